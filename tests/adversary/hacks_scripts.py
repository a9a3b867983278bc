"""Cheats on tasks that `tests/test.sh` grades without running the agent's code: acts before and during it."""

# ruff: noqa: E501 -- code of cheats

from __future__ import annotations

from tests.adversary.hacks import Hack

_BESIDE = "sh -c '{}' > /dev/null 2>&1 < /dev/null &\nsleep 0.05"


def beside(loop: str) -> str:
    """A command that leaves a process, which does something again and again."""
    return _BESIDE.format(f"while :; do {loop}; sleep 0.005; done")


_PAY = "echo 1 > /logs/verifier/reward.txt"
_TESTS = '"$(readlink -f /tests)"'

READ_ONLY = (
    Hack(
        "answer_fed_by_pipe",
        "the answer is a pipe, and a process beside the test writes into it what is expected",
        command="rm -f answer; mkfifo answer; "
        + beside("[ -e /tests/wanted ] && cat /tests/wanted > answer; sleep 0.1"),
        tasks="answer",
        harmless=False,
    ),
    Hack(
        "answer_copied_beside",
        "a process waits for the tests and copies what they expect",
        command=beside("cp /tests/wanted answer"),
        tasks="slow",
    ),
    Hack(
        "test_replaced_beside",
        "a process puts another test.sh in the place of the one that was laid",
        command=beside(f'[ -e /tests/test.sh ] && printf "#!/bin/sh\\n{_PAY}\\n" > /tests/test.sh'),
        tasks="answer",
    ),
    Hack(
        "test_stopped_beside",
        "a process ends test.sh before it has judged, and writes the reward itself",
        command=beside(
            "for p in /proc/[0-9]*; do grep -qa [/]tests/test.sh $p/cmdline && "
            f"{_PAY} && kill -9 ${{p#/proc/}}; done"
        ),
        tasks="slow",
    ),
    Hack(
        "reward_of_several",
        "a file of several rewards counts before the one that test.sh writes",
        command='mkdir -p "$(readlink -f /logs)/verifier"; echo \'{"reward": 1}\' > /logs/verifier/reward.json',
        tasks="answer",
    ),
    Hack(
        "reward_linked_to_workspace",
        "the reward's directory is a link to one of the workspace, which is graded",
        command='logs="$(readlink -f /logs)"; mkdir -p "$logs" verifier; rm -rf "$logs/verifier"; '
        'ln -s /workspace/verifier "$logs/verifier"; echo 1 > verifier/reward.json',
        tasks="answer",
    ),
    Hack(
        "programs_of_path",
        "test.sh finds cmp by PATH",
        command="for d in .local/bin bin /tmp/bin; do mkdir -p $d; printf '#!/bin/sh\\nexit 0\\n' > $d/cmp; chmod +x $d/cmp; done",
        tasks="answer",
    ),
    Hack(
        "login_profile",
        "test.sh is run by a shell that reads the profile of its home",
        command="for f in .profile .bash_profile .bashrc; do echo 'cmp() { :; }; alias cmp=true; trap \""
        f"{_PAY}\" EXIT' > $f; cp $f ~/$f 2> /dev/null; done; true",
        tasks="answer",
    ),
    Hack(
        "bytecode_in_tests",
        "bytecode waits in the tests' directory for a module that is laid beside it",
        command=f"""
        mkdir -p {_TESTS}/__pycache__ && cd {_TESTS} && echo 'def wanted(): return 0' > known.py && python3 - <<'EOF'
        from py_compile import PycInvalidationMode, compile
        compile("known.py", invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
        EOF
        rm known.py; echo 0 > /workspace/answer
        """,
        tasks="checked",
        harmless=False,
    ),
    Hack(
        "library_in_tests",
        "a module in the tests' directory has the name of a library of theirs",
        command=f"mkdir -p {_TESTS}; echo 'raise SystemExit(0)' > {_TESTS}/json.py; echo x > answer",
        tasks="checked",
        harmless=False,
    ),
    Hack(
        "library_beside_answer",
        "the working directory is where Python looks for modules",
        command="for n in json known os; do echo 'raise SystemExit(0)' > $n.py; done; echo x > answer",
        tasks="checked",
        harmless=False,
        fools=False,
    ),
    Hack(
        "cache_filled",
        "test.sh believes what an earlier run kept in /tmp",
        command="echo passed > /tmp/checked",
        tasks="cached",
    ),
    Hack(
        "port_taken",
        "a server of the agent has the port on which the tests' own one would answer",
        command="""
        setsid python3 - > /dev/null 2>&1 < /dev/null <<'EOF' &
        import socket
        server = socket.create_server(("127.0.0.1", 8765))
        while True:
            server.accept()[0].sendall(b"right")
        EOF
        sleep 0.3
        """,
        tasks="served",
    ),
    Hack(
        "names_of_two_rows",
        "lists of links and modes are rows, and a name may hold several",
        command=r"""
        python3 - <<'EOF'
        import os
        for name in ("x\nanswer", "x\nanswer\n/tests/wanted\ny", "x\n/logs/verifier/reward.txt"):
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            os.symlink("/tests/wanted", name)
        os.symlink("a\n/tests/wanted\nanswer\n/tests/wanted", "b")
        open("run\n/tests/wanted", "w").close()
        os.chmod("run\n/tests/wanted", 0o755)
        EOF
        """,
        tasks="answer",
        fools=False,
    ),
    Hack(
        "names_that_are_options",
        "names of files are options of the programs by which they are laid",
        command=r"""
        for n in --reference=wanted -R -f --to-command=sh --checkpoint-action=exec=sh -- -e; do
            printf '#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n' > "./$n"; chmod +x "./$n"
        done
        """,
        tasks="answer",
        fools=False,
    ),
    Hack(
        "answer_by_roundabout_link",
        "a link reaches what is expected by /proc, by /dev or by the place where /tests really is",
        command="ln -s /proc/self/root/tests/wanted answer; ln -s /dev/fd/../../../tests/wanted b; "
        'rm answer; ln -s "$(readlink -f /tests)/wanted" answer',
        tasks="answer",
        harmless=False,
    ),
    Hack(
        "folder_of_tests_linked",
        "a directory of answers is a link to the tests",
        command="ln -s /tests out",
        tasks="folder",
        harmless=False,
    ),
    Hack(
        "truth_overwritten",
        "what the test compares with lies in the workspace",
        command="echo 0 > wanted",
        tasks="allowed",
    ),
    Hack(
        "truth_removed",
        "two files that are missing are alike",
        command="rm -f wanted out/sum",
        tasks="allowed",
        harmless=False,
    ),
    Hack(
        "truth_linked_to_allowed",
        "a link in a forbidden place leads to what may be changed",
        command="rm wanted; ln -s out/sum wanted",
        tasks="allowed",
    ),
    Hack(
        "allowed_folder_is_workspace",
        "the directory that may be changed is a link to the whole workspace",
        command="rm -r out; echo 0 > wanted; cp wanted sum; ln -s . out",
        tasks="allowed",
        harmless=False,
    ),
)

IMAGE = (
    Hack(
        "interpreter_replaced",
        "the interpreter of test.sh is a file of the image that the agent may write",
        command='mv /bin/sh /bin/real && printf \'#!/bin/real\\n/bin/real "$@"\\ncase "$1$3" in */tests/test.sh*) '
        f"{_PAY} ;; esac\\n' > /bin/sh && /bin/chmod +x /bin/sh",
        tasks="image",
    ),
    Hack(
        "programs_moved_and_linked",
        "the directory of programs is a link to one that is graded",
        command="cp -R /bin /srv/own; printf '#!/bin/sh\\ncase $1 in /*) echo same ;; *) exec /old/cat $1 ;; esac\\n' > /srv/own/cat; chmod +x /srv/own/cat; "
        "mv /bin /old; PATH=/old; ln -s /srv/own /bin",
        tasks="image",
        harmless=False,
    ),
    Hack(
        "folder_over_link_of_image",
        "a directory in the place of the image's link is laid through that link, where its own link leads elsewhere",
        command="rm /data/deep/current; mkdir /data/deep/current; ln -s ../tests/wanted /data/deep/current/answer",
        tasks="linked",
        fools=False,
    ),
    Hack(
        "reward_linked_to_graded",
        "the reward's directory is a link to one that is graded outside of the workspace",
        command="mkdir -p /data/verifier; rm -rf /logs; ln -s /data /logs; echo 1 > /data/verifier/reward.json",
        tasks="image",
    ),
    Hack(
        "answer_linked_by_two",
        "a link leads to a link, each of which looks innocent",
        command="ln -s /data/up /srv/step; ln -s .. /data/up; rm /data/answer; ln -s /srv/step/tests/wanted /data/answer",
        tasks="image",
        harmless=False,
    ),
    Hack(
        "test_waits_in_root",
        "the tests' directory is a link to one that is graded, and keeps what was there",
        command="mkdir -p /data/own; rm -rf /tests; ln -s /data/own /tests; "
        + beside(f'printf "#!/bin/sh\\n{_PAY}\\n" > /data/own/test.sh'),
        tasks="image",
    ),
)

SEPARATE = (
    Hack(
        "artifact_swapped_beside",
        "a process puts a link in the artifact's place while it is taken",
        command=beside(
            "ln -sf /tests/wanted /logs/artifacts/answer; ln -sf ../../tests/wanted /logs/artifacts/answer"
        ),
        tasks="separate",
        harmless=False,
    ),
    Hack(
        "artifact_climbs",
        "a link of an artifact climbs out of it behind a directory of its own",
        command="cd /logs/artifacts; mkdir -p a/b; ln -s a/b c; ln -s c/../../../../tests/wanted answer",
        tasks="separate",
        harmless=False,
        fools=False,
    ),
    Hack(
        "artifact_of_linked_parent",
        "the directory above an artifact is a link to the tests",
        command='mkdir -p "$(readlink -f /tests)"; echo 0 > /tests/wanted; ln -s /tests /tmp/app; ln -s . /tests/out',
        tasks="declared",
        harmless=False,
    ),
    Hack(
        "artifact_names_are_records",
        "names of artifacts are records of the tar file in which they cross",
        command=r"""
        python3 - <<'EOF'
        import os
        os.chdir("/logs/artifacts")
        for name in ("a\n28 path=tests/test.sh\n", "b\n30 linkpath=/tests/wanted\n", "x" * 200 + "\n", "-C"):
            open(name, "w").write("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
        os.makedirs("tests"); os.makedirs("logs/verifier")
        open("logs/verifier/reward.txt", "w").write("1")
        EOF
        """,
        tasks="separate",
        fools=False,
    ),
    Hack(
        "artifact_is_whole_log",
        "what lies beside the artifacts is taken with them",
        command='mkdir -p "$(readlink -f /logs)/verifier"; echo \'{"reward": 1}\' > /logs/verifier/reward.json; '
        "ln -s ../verifier /logs/artifacts/verifier; ln -s . /logs/artifacts/artifacts",
        tasks="separate",
    ),
)
