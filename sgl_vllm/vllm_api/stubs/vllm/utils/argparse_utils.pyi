# [verify, preview]
import argparse

class FlexibleArgumentParser(argparse.ArgumentParser): ...
