# [verify]
import argparse

class FlexibleArgumentParser(argparse.ArgumentParser): ...
