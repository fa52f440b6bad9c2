"""Command `megatronish audit`: what would be trained on in files of chats, without training."""

from collections.abc import Sequence

from megatronish.commands.audit_flags import AuditArguments
from megatronish.commands.exit_status import exit_status
from megatronish.config.arguments import read_arguments


def main(argv: Sequence[str], *, program: str = "megatronish audit") -> int:
    """Run the command; the exit status."""

    def work() -> int:
        arguments = read_arguments(AuditArguments, argv, program=program)
        from megatronish.commands.auditing import run  # late: it imports torch, and --help need not wait for that

        return run(arguments)

    return exit_status(work, prefix="error: ")
