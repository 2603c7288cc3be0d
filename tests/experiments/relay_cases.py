"""What the tests of the RoPERelay experiments share: a tiny model that reads characters, and stored histories."""

import string

import torch
import transformers

from kvverify.experiments.relay_answers import Reader

VOCAB = 97
TEXTS = [
    f"Paragraph {number} is filler, of {letter} and {letter}."
    for number in range(60)
    for letter in string.ascii_lowercase
]


def encode(text):
    return [ord(character) % VOCAB for character in text]


def decode(tokens):
    return " ".join(f"t{token}" for token in tokens)


def tiny_reader(*, stop=()):
    """Three layers, so that there are an early, a middle and a late one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            initializer_range=0.3,
        )
        model = transformers.LlamaForCausalLM(config).eval()
    return Reader(model, encode, decode, stop, TEXTS)


def stored_history(number, plans, *, kinds=("fact", "update"), selector="bm25", settings=None):
    """One history as `answers` stores it: question i of each kind has these plans {name: [answer, nll]} in one cell."""
    return {
        "settings": settings or {"tokens": 2048, "selectors": [selector]},
        "number": number,
        "tokens": 2000,
        "tokens_sha256": "0" * 64,
        "date": "1 May 2024",
        "questions": [
            {
                "name": f"{number}-{kind}",
                "kind": kind,
                "question": f"What of {kind}?",
                "reference": "cocoa",
                "full": ["cocoa", 0.5],
                "cells": [
                    {
                        "selector": selector,
                        "retention": 0.1,
                        "budget": 200,
                        "kept": 200.0,
                        "evidence_kept": 0.5,
                        "plans": plans,
                    }
                ],
            }
            for kind in kinds
        ],
    }
