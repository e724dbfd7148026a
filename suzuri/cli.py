"""The command `suzuri`. Each subcommand parses one config and calls one function."""

import os
import sys
from collections.abc import Callable, Sequence

from suzuri import __version__
from suzuri.log import start_logging

Run = Callable[[Sequence[str]], int]


def trace(args: Sequence[str]) -> int:
    """prove a checkpoint's numbers layer by layer against a golden folder"""
    from suzuri.config import parse
    from suzuri.tools.trace_config import TraceConfig

    config = parse(TraceConfig, prog="suzuri trace", args=args).resolve()
    from suzuri.tools.trace import run_trace

    return run_trace(config)


def convert(args: Sequence[str]) -> int:
    """write a checkpoint in another layout, or with NVFP4 experts; resumable"""
    from suzuri.config import parse
    from suzuri.tools.convert_config import ConvertConfig

    config = parse(ConvertConfig, prog="suzuri convert", args=args).resolve()
    from suzuri.tools.convert import run_convert

    return run_convert(config)


def doctor(args: Sequence[str]) -> int:
    """look at this machine: one report to paste into an issue"""
    from suzuri.config import parse
    from suzuri.tools.doctor.config import DoctorConfig

    config = parse(DoctorConfig, prog="suzuri doctor", args=args).resolve()
    from suzuri.tools.doctor.run import run_doctor

    return run_doctor(config)


def inspect(args: Sequence[str]) -> int:
    """show what is in a checkpoint, by part, and whether it is complete"""
    from suzuri.config import parse
    from suzuri.tools.inspect.config import InspectConfig

    config = parse(InspectConfig, prog="suzuri inspect", args=args).resolve()
    from suzuri.tools.inspect.run import run_inspect

    return run_inspect(config)


def pull(args: Sequence[str]) -> int:
    """fetch a model from the hub: resumed, checked, complete or the reason why not"""
    from suzuri.config import parse
    from suzuri.tools.pull.config import PullConfig

    config = parse(PullConfig, prog="suzuri pull", args=args).resolve()
    from suzuri.tools.pull.run import run_pull

    return run_pull(config)


def plan(args: Sequence[str]) -> int:
    """say whether and how a model runs on some hardware, without a GPU and the weights"""
    from suzuri.config import parse
    from suzuri.tools.plan.config import PlanConfig

    config = parse(PlanConfig, prog="suzuri plan", args=args).resolve()
    from suzuri.tools.plan.run import run_plan

    return run_plan(config)


def serve(args: Sequence[str]) -> int:
    """serve a model over HTTP with OpenAI's API"""
    from suzuri.config import parse
    from suzuri.server.config import ServeConfig

    config = parse(ServeConfig, prog="suzuri serve", args=args).resolve()
    from suzuri.server.run import run_serve

    return run_serve(config)


def generate(args: Sequence[str]) -> int:
    """complete many prompts from a file or stdin, JSON lines out"""
    from suzuri.config import parse
    from suzuri.tools.generate.config import GenerateConfig

    config = parse(GenerateConfig, prog="suzuri generate", args=args).resolve()
    from suzuri.tools.generate.run import run_generate

    return run_generate(config)


def chat(args: Sequence[str]) -> int:
    """talk to a model in the terminal: a server's, or one in this process"""
    from suzuri.config import parse
    from suzuri.tools.chat.config import ChatConfig

    config = parse(ChatConfig, prog="suzuri chat", args=args).resolve()
    from suzuri.tools.chat.run import run_chat

    return run_chat(config)


def demo(args: Sequence[str]) -> int:
    """see the small model of this package answer a text, a picture, a sound and a tool question"""
    from suzuri.config import parse
    from suzuri.tools.demo.config import DemoConfig

    config = parse(DemoConfig, prog="suzuri demo", args=args).resolve()
    from suzuri.tools.demo.run import run_demo

    return run_demo(config)


def verify(args: Sequence[str]) -> int:
    """prove that serving changes no bit: every cache and batch against one forward"""
    from suzuri.config import parse
    from suzuri.tools.verify.config import VerifyConfig

    config = parse(VerifyConfig, prog="suzuri verify", args=args).resolve()
    from suzuri.tools.verify.run import run_verify

    return run_verify(config)


def bench(args: Sequence[str]) -> int:
    """time the engine or the kernels, beside floors and other systems; draw the results"""
    from suzuri.tools.bench.config import parse_bench

    config = parse_bench(args).resolve()
    from suzuri.tools.bench.run import run_bench

    return run_bench(config)


def evaluate(args: Sequence[str]) -> int:
    """let a model answer tasks that it never trained on, and grade the answers"""
    from suzuri.config import parse
    from suzuri.evals.config import EvalConfig

    config = parse(EvalConfig, prog="suzuri eval", args=args).resolve()
    from suzuri.evals.run import run_eval

    return run_eval(config)


def sft(args: Sequence[str]) -> int:
    """train a model on conversations or plain text, by a recipe or by flags; resumable"""
    from suzuri.training.recipe import parse_sft

    config = parse_sft(args).resolve()
    from suzuri.engine.devices import device_named
    from suzuri.training.sft import run_sft

    device_named(config.device, f"--device {config.device}")
    return run_sft(config)


def rl(args: Sequence[str]) -> int:
    """let a model learn from what its answers are worth; RECIPE is a Python file"""
    from suzuri.rl.recipe import parse_rl

    config = parse_rl(args)
    if config is None:
        return 0
    config = config.resolve()
    from suzuri.rl.run import run_rl

    return run_rl(config)


def plot(args: Sequence[str]) -> int:
    """draw the metrics of runs as curves"""
    from suzuri.config import parse
    from suzuri.tools.plot_config import PlotConfig

    config = parse(PlotConfig, prog="suzuri plot", args=args).resolve()
    from suzuri.tools.plot import run_plot

    return run_plot(config)


COMMANDS: dict[str, Run] = {
    "demo": demo,
    "serve": serve,
    "chat": chat,
    "generate": generate,
    "plan": plan,
    "pull": pull,
    "inspect": inspect,
    "convert": convert,
    "doctor": doctor,
    "trace": trace,
    "verify": verify,
    "bench": bench,
    "eval": evaluate,
    "sft": sft,
    "rl": rl,
    "plot": plot,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit code 2 for a wrong command line or input, 141 when the reader of the output
    went away (`| head`): nobody is left to tell, and it is no verdict. Else the subcommand's own.
    """
    let_idle_threads_sleep()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:
        code = 141
    _drop_unwritten()
    sys.exit(code)


WAITING = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
"""To GNU's and to LLVM's OpenMP: whichever this torch came with."""


def let_idle_threads_sleep() -> None:
    """Before torch is loaded: its threads sleep between two operations, unless the user has said
    how they wait. They would keep the cores busy on which the loops of suzuri/kernels compute."""
    if not any(name in os.environ for name in (*WAITING, "GOMP_SPINCOUNT")):
        os.environ.update(WAITING)


def _run(words: Sequence[str]) -> int | str | None:
    """The exit code of a command line, after the last of its output has been written."""
    name = " ".join(["suzuri", *words[:1]])
    if sys.stdout is None:  # `>&-`
        print(f"{name}: standard output is closed; send it to /dev/null", file=sys.stderr)
        return 2
    try:
        try:
            code = _call(words)
        except SystemExit as end:
            # rich makes exit code 1 of a broken pipe, which is a verdict of some commands.
            code = 141 if isinstance(end.__context__, BrokenPipeError) else end.code
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        # What a user can cause arrives as one of these, with the fix in its text.
        print(f"{name}: {error}", file=sys.stderr)
        return 2


def _call(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"suzuri {__version__}")
        return 0
    run = COMMANDS.get(words[0])
    if run is None:
        print(f"suzuri: no command {words[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    start_logging()
    return run(words[1:])


def _drop_unwritten() -> None:
    """What could not be written is not tried again by Python at exit, which would end with 120."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _usage() -> str:
    lines = [f"  {name:<10} {run.__doc__}" for name, run in COMMANDS.items()]
    return "\n".join(
        ["usage: suzuri COMMAND [options]      (suzuri COMMAND --help)", "", "commands:", *lines]
    )


if __name__ == "__main__":
    main()
