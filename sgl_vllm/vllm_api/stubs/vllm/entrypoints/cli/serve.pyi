# [preview, engine_backend]
from vllm.utils.argparse_utils import FlexibleArgumentParser

def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser: ...
