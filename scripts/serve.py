"""Serve a trained model with a chat page, and with OpenAI's API under /v1.

python -m scripts.serve RUN --port 9000 --temperature 0
"""

from lm.common.errors import UsageError, one_line_errors
from lm.common.parser import OneLineParser
from lm.inference.prompts import say
from scripts.model_flags import add_model_flags, at_least_1, load_to_talk, sampling_of

LOCAL = ("127.0.0.1", "localhost", "::1")  # hosts that only this machine can reach


@one_line_errors("serve", UsageError)
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m scripts.serve", description=__doc__)
    add = parser.add_argument
    add_model_flags(add)
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all addresses")
    hosts = "also accept this name in the Host header, such as a proxy's; can be repeated"
    add("--allowed_host", action="append", default=[], help=hosts)
    add("--port", type=int, default=8000, help="port to listen on; 0: any free port")
    add("--name", help="name of the model in requests (default: from its folder)")
    add("--batch_size", type=at_least_1, default=16, help="answers computed together; others wait")
    args = parser.parse_args(argv)
    sampling = sampling_of(args)
    try:
        from lm.inference.server.app import Served, Server, bind
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}: python -m pip install fastapi uvicorn") from error
    from lm.inference.server.worker import Worker

    bound = bind(args.host, args.port)  # fails before the model is loaded
    decoder, trained = load_to_talk(args)
    served = Served(
        worker=Worker(decoder, together=args.batch_size),
        tokenizer=trained.tokenizer,
        context=decoder.config.max_seq_len,
        name=args.name or trained.name,
        sampling=sampling,
        hosts=(*LOCAL, *args.allowed_host) if args.host in LOCAL else ("*",),
    )
    shown = f"[{args.host}]" if ":" in args.host else args.host
    address = f"http://{shown}:{bound.getsockname()[1]}"
    say(f"{served.name} at {address} (a page), {address}/v1 (OpenAI's interface)")
    if args.host not in LOCAL:
        say("WARNING: anyone who can reach this machine can use the model: there is no API key")
    Server(served).run(sockets=[bound])


if __name__ == "__main__":
    main()
