"""Parts of the search for the first wrong value of a step."""
