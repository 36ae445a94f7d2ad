"""Structured output: what a request asks its answer to look like, as an automaton over the vocabulary.

    response_format    what users write, checked, as a regular expression
    json_schema        a JSON schema as a regular expression
    token_bytes        the bytes that tokens stand for
    automaton          the expression's automaton over tokens, made by a process of its own (automaton_child)

What decoders do with it: `smcjax.decoding.constraints`. Nothing here imports JAX.
"""
