"""Error messages and exit codes of commands: one message per error, and no traceback for a user's mistake."""

from __future__ import annotations

import errno
import sys
from typing import Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from etude.cli.agent_output import EXIT_CLOSED_PIPE, OutputConsole, standard_error, standard_output
from etude.errors import AgentError, EtudeError, InfrastructureError, UserError
from etude.errors.packages import missing_package, package_of

EXIT_MISTAKE = 2
EXIT_INFRASTRUCTURE = 3
EXIT_INTERRUPTED = 130
_PLACE_ERRORS = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
)
"""Errors of a file or directory that cannot be used as requested."""


class ErrorReportingGroup(TyperGroup):
    """Prints EtudeErrors as messages; any other exception is a defect and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command. Raises typer.Exit with the exit code for the error."""
        try:
            return super().invoke(ctx)
        except (UserError, AgentError) as error:
            print_error(error)
            raise typer.Exit(EXIT_MISTAKE) from None
        except InfrastructureError as error:
            print_error(error)
            raise typer.Exit(EXIT_INFRASTRUCTURE) from error
        except ModuleNotFoundError as error:
            top = (error.name or "etude").partition(".")[0]
            if top == "etude" or top in sys.stdlib_module_names:
                raise
            print_error(missing_package("this command", package_of(top)))
            raise typer.Exit(EXIT_MISTAKE) from None
        except BrokenPipeError as error:
            gone = [pipe for pipe in (standard_output(), standard_error()) if pipe.reader_has_left()]
            if not gone:
                raise
            for pipe in gone:
                pipe.stop_writing(error)
            raise typer.Exit(EXIT_CLOSED_PIPE) from None
        except OSError as error:
            if error.errno not in _PLACE_ERRORS:
                raise
            fix = "name another path, free disk space, or change the permissions"
            place = None if error.filename is None else str(error.filename)
            print_error(UserError(error.strerror or str(error), field=place, fix=fix))
            raise typer.Exit(EXIT_MISTAKE) from None
        except KeyboardInterrupt:
            error_console().print("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None


def error_console() -> OutputConsole:
    """A new console on standard error, so that it follows redirections."""
    return OutputConsole(stderr=True)


def print_error(error: EtudeError) -> None:
    """Prints an error's message, the received value and the fix on standard error."""
    what = f"{error.field}: {error.message}" if error.field else error.message
    console = error_console()
    console.print(Text.assemble(("error: ", "bold red"), what), soft_wrap=True)
    if error.received is not None:
        console.print(Text(f"  received: {error.received!r}"), soft_wrap=True)
    if error.fix:
        console.print(Text.assemble("  fix: ", (error.fix, "green")), soft_wrap=True)
