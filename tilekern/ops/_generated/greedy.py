"""greedy, made from its declaration by ``python -m tilekern.ops.writing``; change that and not this."""


def check(logits):
    if logits.dim() < 1:
        raise ValueError(f"greedy: logits must have the shape [..., vocabulary], got {list(logits.shape)}")
    check_tensors("greedy", logits=logits)


def find(graded, logits):
    if not logits.numel() or not (logits.shape[-1] <= 524288):
        return None
    vocabulary = logits.shape[-1]
    sizes = (logits.numel() // vocabulary, vocabulary, logits.dtype)
    forward_plan = plan_for(FORWARD, logits.device, *sizes)
    if forward_plan is None:
        return None
    backward_plan = None
    device = logits.device
    index = logits.get_device()
    flat = logits.dim() == 2
    see = Rows if logits.is_cuda else viewed
    rows = logits.numel() // vocabulary
    ids_dtype = torch.int64
    return (forward_plan, backward_plan, device, index, flat, see, rows, vocabulary, ids_dtype)


def plans_of(graded, logits):
    key = (logits.shape, logits.dtype, logits.get_device(), graded)
    try:
        return known[key]
    except KeyError:
        check(logits)
        if not logits.is_cuda:
            return find(graded, logits)
        return keep(known, key, find(graded, logits))


def launch(plans, logits):
    forward_plan, _, device, index, flat, see, rows, vocabulary, ids_dtype = plans
    logits_whole = logits.is_contiguous()
    ids = empty((*logits.shape[:-1],), dtype=ids_dtype, device=device)
    if flat:
        forward_plan.launch(
            index,
            logits if logits_whole else as_rows(logits),
            ids,
        )
    else:
        forward_plan.launch(
            index,
            see(logits, (rows, vocabulary)) if logits_whole else as_rows(logits),
            see(ids, (rows,)),
        )
    return ids


def fallback(logits):
    count_fallback(FORWARD)
    with uncast(logits.device.type):
        return formula(logits)


def greedy(logits):
    if is_compiling() or transforms() or (modes() and not logits.is_meta):
        check(logits)
        if not is_compiling() and transforms():
            return fallback(logits)
        return registered(logits)
    plans = plans_of(False, logits)
    if plans is None:
        return fallback(logits)
    try:
        return launch(plans, logits)
    except NoVariant as error:
        refused(FORWARD, error)
        return fallback(logits)


def fake(logits):
    ids = logits.new_empty(logits.shape[:-1], dtype=torch.int64)
    return ids


def run(logits):
    plans = plans_of(False, logits)
    if plans is not None:
        try:
            return launch(plans, logits)
        except NoVariant as error:
            refused(FORWARD, error)
    ids = fallback(logits)
    return ids.contiguous()
