"""Conversion of conversations to tokens and of sampled answers to responses, for every supported chat API.

    request --dialect--> messages --framing, histories--> tokens -> sampler -> tokens --reader--> parts
    client <--dialect's writer--------------------------------------------------------------------'

Read `messages`, then `dialects` (each reads requests into a `ChatRequest`, and writes answers in its own
form), `framing` and `reader`. Depends on neither HTTP nor samplers.
"""
