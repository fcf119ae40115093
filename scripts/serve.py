"""Serve a trained model: OpenAI's interface under /v1, and a page to talk to it.

python -m scripts.serve RUN --port 9000 --temperature 0
"""

import argparse

from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from inference.prompts import say
from scripts.model_flags import add_model_flags, at_least_1, load_to_talk, sampling_of

LOCAL = ("127.0.0.1", "localhost")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m scripts.serve", description=__doc__)
    add = parser.add_argument
    add_model_flags(add)
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all of this machine's")
    add("--port", type=int, default=8000, help="port to listen on; 0: any free one")
    add("--name", help="what requests call the model (default: that of its run)")
    add("--batch_size", type=at_least_1, default=16, help="answers written together; others wait")
    add("--max_request_kb", type=at_least_1, default=1024, help="size of a request, at most")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("serve", UsageError):
        serve(parse_arguments(argv))


def serve(args: argparse.Namespace) -> None:
    sampling = sampling_of(args)
    try:
        from inference.server.app import Served, Server, bind
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}: python -m pip install fastapi uvicorn") from error
    from inference.worker import Worker

    bound = bind(args.host, args.port)
    decoder, trained = load_to_talk(args)
    served = Served(
        worker=Worker(decoder, together=args.batch_size),
        tokenizer=trained.tokenizer,
        context=decoder.config.max_seq_len,
        name=args.name or trained.name,
        sampling=sampling,
        max_bytes=args.max_request_kb * 1024,
        hosts=LOCAL if args.host in LOCAL else ("*",),
    )
    address = f"http://{args.host}:{bound.getsockname()[1]}"
    say(f"{served.name} at {address} (a page), {address}/v1 (OpenAI's interface)")
    if args.host not in LOCAL:
        say("whoever reaches this machine can use it: it asks for no key")
    Server(served).run(sockets=[bound])


if __name__ == "__main__":
    main()
