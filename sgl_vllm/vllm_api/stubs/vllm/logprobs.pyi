# [routes]
class Logprob:
    logprob: float
