"""Structured output: what a request asks its answer to look like, as an automaton over the vocabulary.

    response_format      what users write, its form checked
    parts                sets of texts, of which rules are made; expressions (regular), grammar_text (context-free) and
                         json_schema read them
    schema_alternatives  a schema as what it leaves of each type (json_values), by its keywords (schema_keywords)
    json_texts           texts of values and strings (formats), and of numbers (json_numbers)
    grammar              rules as an automaton over bytes, to a depth of nesting
    byte_automata        automata over bytes: joined, met, made minimal
    automaton            the automaton over tokens, made by a process of its own (automaton_child)

What decoders do with it: `smcjax.decoding.constraints`. Nothing here imports JAX.
"""
