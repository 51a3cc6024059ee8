"""A training step of speculators 0.9.0's P-EAGLE, for `training_step.py`: its model and loss, called as by its trainer.

The trainer keeps weights in fp32, computes under bf16 autocast, and compiles the model's forward pass. A batch has the
format of its collator for one document. Compiling takes minutes and may hang, so `CompileLog` prints every stage.

With torch 2.10 and later, the first layer causes a graph break inside the loop over the layers. Dynamo then compiles
not the forward pass itself, but the functions it calls: mask, each kind of layer, norms, loss and metrics. These are 14
forward and 5 backward graphs, about 80 kernels. `speculators-eager` compiles only attention and its mask.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from training_variants import SHAPES, documents, sample_cod_positions, step_flops

Json = dict[str, Any]
Measure = Callable[[Callable[[], None], Json, Callable[[], None]], Json]
STAGE = "stage: "  # prefix of the lines in the worker's log
SLOW = 2.0  # seconds; slower kernels get a line of their own
SILENCE = 20.0  # seconds without a stage until the position in the code is printed


class CompileLog:
    """Prints what the compiler does. It adds nothing to steps that are compiled already."""

    def __init__(self) -> None:
        self.began = self.last = time.perf_counter()
        self.main = threading.get_ident()
        self.num_kernels, self.kernel_s, self.num_graphs, self.kernel = 0, 0.0, 0, ""
        threading.Thread(target=self.watch, daemon=True).start()

    def write(self, text: str) -> None:
        self.last = time.perf_counter()
        print(f"{STAGE}{self.last - self.began:6.1f} s  {text}", flush=True)

    def watch(self) -> None:
        while True:
            time.sleep(1)
            if time.perf_counter() - self.last > SILENCE:
                frame, places = sys._current_frames().get(self.main), []
                while frame is not None and len(places) < 6:
                    places.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
                    frame = frame.f_back
                kernel = f"kernel {self.kernel}: " if self.kernel else ""
                self.write(f"still in {kernel}{' < '.join(places)}")

    def summary(self) -> str:
        return f"{self.num_graphs} graphs, {self.num_kernels} kernels in {self.kernel_s:.0f} s"

    def patch_compiler(self) -> None:
        """Logs graphs and kernels that are compiled from now on."""
        from torch._inductor.graph import GraphLowering
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        make_module, precompile = GraphLowering.compile_to_module, CachingAutotuner.precompile
        benchmark_all = CachingAutotuner.benchmark_all_configs

        def logged_module(graph: Any, *args: Any, **kwargs: Any) -> Any:
            began, before = time.perf_counter(), self.num_kernels
            made = make_module(graph, *args, **kwargs)
            self.num_graphs += 1
            direction = "backward" if graph.is_backward else "forward"
            name = f"graph {self.num_graphs} ({direction}, {len(graph.operations)} operations)"
            self.write(f"{name}: {self.num_kernels - before} kernels, {time.perf_counter() - began:.1f} s")
            return made

        def logged_kernel(kernel: Any, *args: Any, **kwargs: Any) -> None:
            began, configs = time.perf_counter(), len(kernel.configs or ())
            self.kernel = kernel.fn.__name__[:60]
            precompile(kernel, *args, **kwargs)
            self.kernel = ""
            took = time.perf_counter() - began
            self.num_kernels, self.kernel_s = self.num_kernels + 1, self.kernel_s + took
            if took > SLOW:
                self.write(f"kernel {kernel.fn.__name__[:60]}: {configs} configurations, {took:.1f} s")

        def logged_benchmark(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = benchmark_all(kernel, *args, **kwargs)
            if (took := time.perf_counter() - began) > SLOW:
                self.write(f"chose among {len(found)} configurations of {kernel.fn.__name__[:60]}: {took:.1f} s")
            return found

        GraphLowering.compile_to_module = logged_module  # type: ignore[method-assign]
        CachingAutotuner.precompile = logged_kernel  # type: ignore[method-assign]
        CachingAutotuner.benchmark_all_configs = logged_benchmark  # type: ignore[method-assign]


def import_speculators(path: str) -> Any:
    """Imports speculators with placeholders for packages that only its data loader needs."""
    import transformers.models.llama.modeling_llama  # before the placeholders exist
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    def empty_class(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

    sys.path.insert(0, path)
    loaders = ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "datasets", "hs_connectors")
    missing = {name for name in loaders if "." not in name and importlib.util.find_spec(name) is None}
    stand_ins = [name for name in loaders if name.split(".")[0] in missing]
    for name in stand_ins:
        sys.modules[name] = module = ModuleType(name)
        module.__path__, module.__spec__ = [], ModuleSpec(name, None)
        module.__getattr__ = empty_class  # type: ignore[method-assign]
    import speculators

    for name in stand_ins:
        del sys.modules[name]
    return speculators


def separate_kernel_configs() -> None:
    """Gives each loss kernel its own list of launch configurations; Dynamo of torch 2.11 rejects a shared one."""
    from speculators.losses import fused

    for kernel in (fused.loss_forward_kernel, fused.loss_backward_kernel):
        kernel.configs = list(kernel.configs)


def sort_with_torch() -> None:
    """Sorts with torch's own kernel, as the compiler does for dynamic lengths and lengths over 512.

    For the blocks of a mask the compiler would generate Triton sorts, which take minutes to compile.
    """
    from torch._inductor import ir

    def no_triton_sort(kind: type, *, dtypes: tuple[torch.dtype, ...], **_: Any) -> list[None]:
        return [None] * len(dtypes)

    ir.Sort.create = classmethod(no_triton_sort)  # type: ignore[method-assign, assignment]


def compile_attention_only(model: Any, speculators: Any) -> None:
    """Runs the model eagerly, except for attention, which is unusable uncompiled, and its mask."""
    from speculators.models import attention

    kind = speculators.PEagleDraftModel
    kind.forward = getattr(kind.forward, "_torchdynamo_orig_callable", kind.forward)
    attention.flex_attention = torch.compile(attention.flex_attention)
    model._create_mask_fn = torch.compile(model._create_mask_fn)


def speculators_steps(job: Json, measure: Measure) -> Callable[[int], Json]:
    """Builds and calls the model as `speculators.train` does, without the folder of a verifier."""
    log = CompileLog()
    speculators = import_speculators(job["speculators_path"])
    log.write(f"imported, torch {torch.__version__}")
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    shape, cuda = SHAPES[job["shape"]], job["device"] == "cuda"
    layer, width = shape.layer, shape.layer.hidden_size
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=width,
        intermediate_size=layer.intermediate_size,
        num_hidden_layers=shape.drafter_layers,
        num_attention_heads=layer.num_heads,
        num_key_value_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        rms_norm_eps=layer.norm_eps,
        max_position_embeddings=1 << 17,
    )
    # flex attention has no backward pass on the CPU, and the fused loss needs a GPU
    config._attn_implementation = "simple_flex_attention" if cuda else "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=shape.depths)
    verifier = speculators.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    with torch.device(job["device"]):
        model = speculators.PEagleDraftModel(
            speculators.PEagleSpeculatorConfig(
                transformer_layer_config=config,
                draft_vocab_size=shape.vocab,
                eagle_aux_hidden_state_layer_ids=list(shape.aux_layer_ids),
                mask_token_id=0,
                embed_requires_grad=False,
                speculators_config=speculators.SpeculatorsConfig(
                    algorithm="peagle",
                    proposal_methods=[proposal],
                    default_proposal_method="greedy",
                    verifier=verifier,
                ),
            )
        )
    for table in (model.lm_head, model.verifier_lm_head, model.embed_tokens):  # usually copied from the verifier
        torch.nn.init.normal_(table.weight, std=0.02)
    model.train()
    if cuda:
        torch.cuda.synchronize()
        log.patch_compiler()
        separate_kernel_configs()
        sort_with_torch()
        if job["variant"] == "speculators-eager":
            compile_attention_only(model, speculators)
    log.write(f"model built, {sum(p.numel() for p in model.parameters()) / 1e9:.2f}G parameters")
    call, _ = model.get_trainer_kwargs(
        loss_fn="kl_div",
        loss_implementation="fused" if cuda else "eager",
        max_anchors=None,
        num_depths=shape.depths,
        down_sample_ratio=shape.rate,
        down_sample_ratio_min=0.0,
    )

    def at(tokens: int) -> Json:
        def noise(wide: int) -> Any:
            return torch.randn(1, tokens, wide, dtype=torch.bfloat16, device=job["device"])

        batch = {
            "hidden_states": noise(len(shape.aux_layer_ids) * width),
            "verifier_last_hidden_states": noise(width),
            "input_ids": torch.randint(1, shape.vocab, (1, tokens), device=job["device"]),
            "document_ids": torch.zeros(1, tokens, dtype=torch.long, device=job["device"]),
            "position_ids": torch.arange(1, tokens + 1, device=job["device"])[None],
            "loss_mask": torch.ones(1, tokens, dtype=torch.bool, device=job["device"]),
        }
        metrics: Json = {}
        # compile for this length only: the trainer's batches all have one length
        torch._dynamo.reset()
        log.write(f"{tokens} tokens: starting")

        def step() -> None:
            first = not metrics
            with torch.autocast(job["device"], dtype=torch.bfloat16):
                _, loss, step_metrics = model(**batch, **call)
            if first:
                log.write(f"{tokens} tokens: first forward pass launched; {log.summary()}")
            loss.backward()
            if first:
                log.write(f"{tokens} tokens: first backward pass launched; {log.summary()}")
            metrics.update(step_metrics)

        found = measure(step, job, lambda: model.zero_grad(set_to_none=True))
        log.write(f"{tokens} tokens: measured, {found['ms']:.1f} ms; {log.summary()}")
        without_gradient = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert not without_gradient, f"no gradient for {without_gradient}"
        one = documents([tokens], 0.0, shape.vocab)
        flops = step_flops(shape, one, sample_cod_positions(one, shape.depths, shape.rate, torch.Generator()))
        found |= {"rows": int(metrics["full_acc_total"]), "weights_gb": sum(p.nbytes for p in model.parameters()) / 1e9}
        return found | {"flops": flops.total, "attention_flops": flops.attention}

    return at
