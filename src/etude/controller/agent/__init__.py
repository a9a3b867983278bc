"""The agent for people: a repository, a sandbox that mirrors it, and a session that survives crashes.

    words --> Conversation --> run_session --> MirroredWorkspace --> sandbox
                  |                                   |
              SessionFolder (journal, changes)     Mirror <--> DirectoryTree (or EditorTree)

The terminal (`cli.agent_terminal`) and editors (`cli.agent_acp`) are two front ends of one Conversation.
"""
