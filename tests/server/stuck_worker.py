"""An engine's process that takes requests and never gets on; by the model's name it does worse."""

import sys
import time

import msgspec
import zmq

from suzuri.engine.messages import (
    FROM_LOADING,
    FROM_RUNNING,
    VERSION,
    Heartbeat,
    Load,
    Progress,
    encode,
    request_decoder,
)
from tests.server.fakes import ready


def main(folder: str) -> None:
    context = zmq.Context()
    requests, reports = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    requests.connect(f"ipc://{folder}/requests.sock")
    reports.connect(f"ipc://{folder}/reports.sock")
    load = request_decoder().decode(requests.recv())
    assert isinstance(load, Load)
    if load.model == "dies":
        sys.exit(3)
    if load.model == "loads on":
        reports.send_multipart([FROM_LOADING, encode(Progress("loading", 1, 2))])
        time.sleep(3600)
    version = VERSION + (load.model == "other version")
    found = msgspec.structs.replace(ready(), version=version)
    reports.send_multipart([FROM_LOADING, encode(found)])
    if load.model == "garbage":
        reports.send_multipart([FROM_RUNNING, b"\xc1 nonsense"])
    busy = False
    while True:
        busy = busy or bool(requests.poll(0))
        reports.send_multipart([FROM_RUNNING, encode(Heartbeat(7, busy))])
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1])
