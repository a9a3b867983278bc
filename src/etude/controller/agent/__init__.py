"""The agent at work for people: a repository, a sandbox that mirrors it, a session that survives.

    words --> Conversation --> run_session --> MirroredWorkspace --> sandbox
                  |                                   |
              SessionFolder (journal, changes)     Mirror <--> Tree (the repository, or an editor's buffers)

The terminal (`cli.agent_terminal`) and editors (`cli.agent_acp`) are two faces of one Conversation.
"""
