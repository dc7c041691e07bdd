"""Names of steps, and sizes of differences, in sentences."""

from normscope.compare.keys import OUTPUT


def name_of_step(name: str) -> str:
    """The name of a step in a sentence."""
    if name.endswith(" in"):
        return f"the input of {name_of_step(name.removesuffix(' in'))}"
    return _WORDS.get(name, name)


_WORDS = {
    "embedding": "the token embedding",
    "embedding norm": "the norm after the embeddings",
    "entry": "the entry",
    "sum": "the sum of branch and stream",
    "exit": "the block's exit",
    "hidden": "the last hidden state",
    "query": "the queries",
    "key": "the keys",
    "value": "the values",
    "logits": "the attention's logits",
    "probabilities": "the attention's probabilities",
    "mixed": "the mixed values",
    "q": "the query projection",
    "k": "the key projection",
    "v": "the value projection",
    "o": "the output projection",
    "up": "the up projection",
    "gate": "the gate projection",
    "act": "the activation",
    "down": "the down projection",
    "output": "the branch's output",
    "final norm": "the final norm",
    OUTPUT: "the output of the model",
}


def amount(value: float | None) -> str:
    """The size of a difference in words."""
    return "an unknown amount" if value is None else f"{value:.1g}"
