"""Mid-training data of the trails family."""

from etude.agent import core_registry
from etude.config import RunConfig
from etude.tokens.grammar import XmlGrammar
from etude.tokens.renderer import Renderer
from etude_quickstart.trail_family import trail_documents, train_trail_tokenizer


def test_calls_that_failed_are_shown_but_not_taught():
    values = {
        "tokenizer": {"vocab_size": 400},
        "tasks": {"family": "trails", "trail_lengths": [30, 60]},
        "agent": {
            "max_turns": 1000,
            "max_tokens": 320,
            "summary_at_tokens": 200,
            "max_summary_tokens": 24,
            "max_message_tokens": 40,
        },
        "midtrain": {"num_sessions": 6},
    }
    config = RunConfig.model_validate(values)
    renderer = Renderer(train_trail_tokenizer(config), XmlGrammar(core_registry().schemas))
    untaught = [
        renderer.tokenizer.decode(document.tokens[document.agent & (document.weights == 0)])
        for document in trail_documents(config, renderer)
    ]
    slips = [text for text in untaught if text]
    assert slips and all("read_file" in text or "edit_lines" in text for text in slips)
    assert len(slips) < len(untaught)
