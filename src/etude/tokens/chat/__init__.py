"""Conversations as tokens, and answers as what clients are served, in every chat API that our servers speak.

    request --dialect--> messages --framing, histories--> tokens -> sampler -> tokens --reader--> parts
    client <--dialect's writer--------------------------------------------------------------------'

Read `messages`, then `dialects` (each reads requests into a `ChatRequest`, and writes answers in its own
form), `framing` and `reader`. Knows neither HTTP nor samplers.
"""
