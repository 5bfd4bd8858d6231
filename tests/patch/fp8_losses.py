"""Short trainings of small models, whose losses and gradients tests of 8-bit floats compare."""

import torch


def ids_of(batch=2, length=96):
    """Tokens that can be learnt: each is the one before and a constant."""
    start = torch.arange(batch)[:, None] * 17
    return (start + 5 * torch.arange(length)) % 256


def losses(model, steps):
    optimizer, ids, found = torch.optim.AdamW(model.parameters(), lr=1e-3), ids_of(), []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return torch.tensor(found)


def gradients_made_again(model):
    """The gradients of one step, and those of it with activations that checkpoints make again."""
    ids, found = ids_of(), []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append([x.grad.clone() for x in model.parameters()])
    return found
