"""Reasons why two models part: each is tested on the tensors of both sides, and confirmed by undoing it."""
