def explain(module, *inputs):
    raise NotImplementedError
