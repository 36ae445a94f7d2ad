"""Structured output: what a request asks its answer to look like, as an automaton over the vocabulary.

    response_format    what users write, checked, as a regular expression or a grammar
    json_schema        a JSON schema as a regular expression
    token_bytes        the bytes that tokens stand for
    grammar            a context-free grammar (grammar_text) as an automaton, to a depth of nesting
    byte_automata      automata over bytes: of expressions, joined, made minimal
    automaton          the automaton over tokens, made by a process of its own (automaton_child)

What decoders do with it: `smcjax.decoding.constraints`. Nothing here imports JAX.
"""
