"""One rank of the test of models with images: against transformers, or against one process.

images_worker.py reference FOLDER                one process; checked against transformers
images_worker.py compare FOLDER TOWERS LAYOUT...
    TOWERS: trained, frozen or both, with a comma; each layout is "tp,pp,cp,vpp,order[,full][,ep=N]"
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from parity_worker import gradients_in_hf_names, objective, on_disk
from safetensors.torch import load_file, save_file
from tiny_images import END, TOKEN, file_of, oracle_logits, picture, processor_of, with_images
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hybridrl.config.schema import TrainConfig
from hybridrl.config.wrapped_models import text_name
from hybridrl.contracts.batch import Producer, Prompt, TrainBatch
from hybridrl.contracts.ragged import joined_blobs
from hybridrl.contracts.response_contents import with_contents
from hybridrl.models.family import read_model
from hybridrl.models.hf.directory import read_config
from hybridrl.models.hf.expert_files import expert_stacks
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.vision.images import FILE, decoded
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.training.model import ModelSource, ParallelModel

# Length of the prompt without images, and of the response; images by the token before which they
# stand: their seed, width and height. Several samples have the same image, and one has none.
SAMPLES: list[tuple[int, int, dict[int, tuple[int, int, int]]]] = [
    (4, 6, {2: (1, 17, 25)}),
    (5, 3, {}),
    (3, 8, {0: (2, 40, 24), 2: (1, 17, 25)}),
    (2, 7, {1: (3, 8, 8)}),
    (6, 2, {1: (4, 64, 20), 5: (5, 9, 31)}),
    (4, 5, {3: (2, 40, 24)}),
]
# Images in responses, as an environment returns them: by sample, the token of the response before
# which one stands, and the image. The last sample shares its prompt with the one before.
LATER = {1: (2, (6, 25, 17)), 5: (4, (7, 40, 16)), len(SAMPLES): (1, (1, 17, 25))}
TOLERANCE = 2e-6  # of the largest gradient, between layouts
FREEZE = {"trained": (), "frozen": None}


def batch_of(processor: Any) -> TrainBatch:
    generator = torch.Generator().manual_seed(5)
    prompts: list[Prompt] = []
    for number, (num_prompt, num_response, pictures) in enumerate(SAMPLES):
        drawn = torch.randint(0, 180, (num_prompt + num_response,), generator=generator).tolist()
        places = {at: file_of(picture(*one)) for at, one in pictures.items()}
        tokens, contents = with_images(processor, tuple(drawn[:num_prompt]), places)
        response = drawn[num_prompt:]
        response[1] = TOKEN  # which the policy may draw, and which stands for no image
        prompts.append(
            Prompt(number, "", tokens, {}, response_tokens=tuple(response), contents=contents)
        )
    # Another response to the last prompt: micro-batches store the prompt and its images once.
    again = replace(prompts[-1], response_tokens=(7, 8, 9, TOKEN))
    group_B = torch.arange(len(prompts) + 1).clamp(max=len(prompts) - 1)
    prompts.append(again)
    blobs = []
    for number, prompt in enumerate(prompts):
        at, one = LATER.get(number, (0, None))
        places = {} if one is None else {at: file_of(picture(*one))}
        response, contents = with_images(processor, prompt.response_tokens or (), places)
        before = len(prompt.tokens)
        moved = [replace(image, start=before + image.start) for image in contents]
        prompts[number] = replace(prompt, response_tokens=response)
        blobs.append(with_contents({}, moved))
    producer = Producer.here("the test of images")
    batch = TrainBatch.supervised(prompts, producer)
    for name, blob in joined_blobs(blobs).items():
        batch = batch.join_blob(producer, name, blob)
    return replace(batch, group_B=group_B)


def run(folder: Path, layout: TrainLayout, recompute: str, frozen: str, budget: int = 96):
    platform = Platform.detect()
    mesh = Mesh(World(platform, 120), layout)
    platform.seed(1)
    hf_config = read_config(folder, folder.name)
    family, shape = read_model(None, hf_config)
    source = ModelSource(family, hf_config, torch.float32, family.name, folder)
    freeze = FREEZE[frozen]
    train = TrainConfig(micro_batch_tokens=budget, recompute=recompute, freeze=freeze)
    model = ParallelModel(mesh, source, "lm", train)
    load_hf(folder, model.layout(), model.weights(), hf_shapes(family, shape))
    model.make_trainable(1e-3)
    batch = batch_of(processor_of(folder, shape.vision))
    plan = model.plan(batch)
    is_shared = [one.whole.prefix_sequences is not None for one in plan.inputs]
    assert layout.world_size > 1 or any(is_shared), "no prompt was shared"
    logp_T = plan.column([output.logp_S for output in model.forward_all(plan.inputs)])
    model.accumulate(plan.inputs, objective)
    gradients = gradients_in_hf_names(model)
    # From the second time on Megatron's hooks reduce gradients while the backward pass runs.
    model.accumulate(plan.inputs, objective)
    for name, (again, held) in gradients_in_hf_names(model).items():
        assert torch.equal(again[held], gradients[name][0][held]), name
    if frozen == "frozen":
        gradients = {n: g for n, g in gradients.items() if ".visual." not in n}
    return model, batch, logp_T * batch.response_mask_T, gradients, model.grad_norm()


def oracle_pass(oracle: Any, processor: Any, prompt: Prompt, number: int) -> torch.Tensor:
    """Returns transformers' logits of a prompt and its response."""
    tokens = torch.tensor([*prompt.tokens, *prompt.response_tokens])
    images = [
        (content.start, content.end, decoded(content.arrays[FILE].tobytes()))
        for content in prompt.contents
    ]
    if number in LATER:
        at, one = LATER[number]
        start = len(prompt.tokens) + at + 1
        end = start + prompt.response_tokens[at + 1 :].index(END)
        images.append((start, end, picture(*one)))
    return oracle_logits(oracle, processor, tokens, images)


def check_against_transformers(folder: Path, batch, logp_T, gradients) -> None:
    oracle = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    loss, expected_T = torch.zeros(()), torch.zeros(batch.num_tokens)
    offsets = batch.offsets.tolist()
    for number, prompt in enumerate(batch.prompts):
        logits = oracle_pass(oracle, processor, prompt, number)
        tokens = torch.tensor([*prompt.tokens, *prompt.response_tokens])
        log_p = logits.log_softmax(-1)
        position = torch.arange(len(prompt.tokens) - 1, len(tokens) - 1)
        logp = log_p[position, tokens[position + 1]]
        entropy = -(log_p.exp() * log_p).sum(-1)[position]
        start = offsets[number] + len(prompt.tokens)
        expected_T[start : offsets[number + 1]] = logp.detach()
        loss = loss + (((position % 5) - 1.5) * logp + 0.3 * entropy).sum() / 100
    loss.backward()
    worst_logp = float((expected_T - logp_T).abs().max())
    assert worst_logp < 2e-5, worst_logp
    expected = {text_name(name): one for name, one in on_disk(oracle, "grad").items()}
    shapes = {name: tuple(one.shape) for name, (one, _) in gradients.items()}
    for name, place in expert_stacks(shapes, lambda *_: False)[0].items():
        if name not in expected:  # the files have a stack
            rows, columns = shapes[name]
            box = place.box(((0, rows), (0, columns)))
            expected[name] = expected[place.stack][tuple(slice(*span) for span in box)][0]
    largest = max(float(g.abs().max()) for n, g in expected.items() if n in gradients)
    worst = 0.0
    for name, (gradient, _) in gradients.items():
        difference = float((gradient - expected[name]).abs().max()) / largest
        worst = max(worst, difference)
        assert difference < 5e-6, f"{name}: gradient differs by {difference}"
    print(f"logp within {worst_logp:.1e}, gradients within {worst:.1e} of the largest", flush=True)


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    failures = []
    for frozen in FREEZE if mode == "reference" else sys.argv[3].split(","):
        path = folder / f"{frozen}.gradients.safetensors.reference"
        if mode == "reference":
            model, batch, logp_T, gradients, norm = run(folder, TrainLayout(1), "none", frozen)
            check_against_transformers(folder, batch, logp_T, gradients)
            tensors = {name: gradient for name, (gradient, _) in gradients.items()}
            save_file(tensors | {"logp_T": logp_T, "norm": torch.tensor(norm)}, path)
            parallel_state.destroy_model_parallel()
            continue
        reference = load_file(path)
        largest = max(float(g.abs().max()) for n, g in reference.items() if "." in n)
        for text in sys.argv[4:]:
            tp, pp, cp, vpp, order, *more = text.split(",")
            ep = next((int(one[3:]) for one in more if one.startswith("ep=")), 1)
            layout = TrainLayout(size, int(tp), int(pp), int(cp), ep=ep, vpp=int(vpp), order=order)
            recompute = "full" if "full" in more else "none"
            _, _, logp_T, gradients, norm = run(folder, layout, recompute, frozen)
            worst = max(
                float(((g - reference[name]).abs() * held).max())
                for name, (g, held) in gradients.items()
            )
            worst_logp = float((logp_T - reference["logp_T"]).abs().max())
            norm_error = abs(norm / float(reference["norm"]) - 1)
            covered = sum(int(held.sum()) for _, held in gradients.values())
            print(
                f"rank {rank} {frozen} {text}: gradient {worst / largest:.1e}, logp "
                f"{worst_logp:.1e}, norm {norm_error:.1e}, held {covered}",
                flush=True,
            )
            is_far = worst > TOLERANCE * largest or worst_logp > 1e-5 or norm_error > 1e-6
            if is_far or not covered:
                failures.append(f"{frozen} {text}")
            parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    if failures:
        sys.exit(f"rank {rank}: too far from one process: {failures}")


if __name__ == "__main__":
    main()
