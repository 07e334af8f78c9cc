"""Of two values that an option of one value is given, none is lost without a word."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

# Options whose one value holds several things → how it is written.
_SEVERAL_IN_ONE = {"gpus": "8xH100,8xA100", "slo": "ttft_p99=2s,tpot_p95=50ms", "without": "3,7"}


class OnceCommand(TyperCommand):
    """A command that refuses an option that is given twice; of two values the last would count."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, each option of one value once."""
        refuse_repeated(self, ctx, args)
        return super().parse_args(ctx, args)


def once_in(application: typer.Typer) -> typer.Typer:
    """The application, its commands of that kind."""
    for command in application.registered_commands:
        command.cls = OnceCommand
    return application


def refuse_repeated(command: Any, ctx: Any, args: list[str]) -> None:
    """Raise a usage error for the first option of one value that ``args`` hold more than once."""
    # With nothing given the parser prints help, and while a shell completes nothing is complained about.
    if not args or ctx.resilient_parsing:
        return
    *_, order = command.make_parser(ctx).parse_args(args=list(args))
    singles = [one for one in order if isinstance(one, TyperOption) and not one.multiple and not one.is_flag]
    for option in singles:
        if singles.count(option) > 1:
            example = _SEVERAL_IN_ONE.get(str(option.name))
            fix = f"join them: {option.opts[0]} {example}" if example else "keep one"
            raise typer.BadParameter(
                f"it is given more than once, and only the last would count; {fix}", param_hint=option.opts[0]
            )
