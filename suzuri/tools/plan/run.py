"""`suzuri plan`: locate the model, plan, print, and give the exit code."""

import json
import sys

from suzuri.tools.plan.card import find_card
from suzuri.tools.plan.changes import find_changes
from suzuri.tools.plan.config import PlanConfig
from suzuri.tools.plan.report import command_line, document, notes_of, sentence, show
from suzuri.tools.plan.request import check_kv_dtype, request_of
from suzuri.tools.plan.verdict import make_plan


def run_plan(asked: PlanConfig) -> int:
    """Print the plan. Returns 0 when it fits, 1 when not. Raises ValueError for input that cannot
    be planned, before the model is looked for where that can be."""
    gpu = find_card(
        asked.gpu,
        memory=asked.memory,
        bandwidth=asked.bandwidth,
        tflops=asked.tflops,
        link=asked.link,
    )
    check_kv_dtype(asked.kv_dtype, gpu)
    from suzuri.model.locate import locate

    located = locate(asked.model)
    config = located.config
    request = request_of(config, asked, gpu)
    plan = make_plan(located.name, config, request)
    changes = [] if plan.fits else find_changes(config, request)
    stored_nvfp4 = config.quantization is not None
    notes = notes_of(plan, stored_nvfp4, asked.random_weights)
    if asked.json:
        print(json.dumps(document(plan, changes, notes), indent=1, allow_nan=False))
    elif not asked.command:
        show(plan, changes, notes)
    elif plan.fits:
        as_stored = stored_nvfp4 == request.nvfp4
        print(command_line(plan, asked.model, as_stored, asked.random_weights))
    else:
        print(sentence(plan, changes), file=sys.stderr)
    return 0 if plan.fits else 1
