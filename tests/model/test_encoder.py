"""Encoders against transformers: folders and GGUF files, pooled as the files say."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaForMaskedLM,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model.encoder import Encoder, EncoderConfig, Pooling, Texts, resolve_encoder
from llorch_worker.weights import open_checkpoint, select_linears

CPU = torch.device("cpu")
LENGTHS = (1, 7, 7, 40, 3)
VOCABULARY, POSITIONS = 300, 64


def shape(**options: Any) -> BertConfig:
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": POSITIONS,
    }  # fmt: skip
    return BertConfig(**sizes | options)


def random_model(kind: type[Any] = BertModel, **options: Any) -> Any:
    torch.manual_seed(7)
    made = shape(**options)
    if not kind.__name__.startswith("Bert"):
        sizes = {
            name: getattr(made, name)
            for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                         "intermediate_size", "max_position_embeddings")
        }  # fmt: skip
        made = kind.config_class(**sizes | options, type_vocab_size=1, pad_token_id=1)
    model = kind(made).eval()
    for parameter in model.parameters():
        # Its own start has no biases, norms of 1, and vectors that hardly differ.
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    return model


def write_modules(folder: Path, pooling: dict[str, Any], *more: str) -> None:
    kinds = ["Transformer", "Pooling", *more]
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [
        {"idx": at, "path": paths.get(kind, kind), "type": f"sentence_transformers.models.{kind}"}
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def write_gguf(
    model: Any,
    path: Path,
    pooling_type: int | None,
    *,
    pooler: bool = False,
    squeezed: bool = False,
    add_more: Callable[[gguf.GGUFWriter], None] = lambda _: None,
) -> Path:
    """``pooler``: whether a head's first matrix is in the file, in the way of RoBERTa's.
    ``squeezed``: without dimensions of 1, as older converters and llama-quantize write a file."""
    config = model.config
    first = config.pad_token_id + 1 if config.model_type != "bert" else 0
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings - first)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    if pooling_type is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling_type))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    for key, values in model.state_dict().items():
        kind = key.rpartition(".")[2]
        if "position_ids" in key or ("pooler" in key and not pooler):
            continue
        if "pooler" in key or (first == 0 and key.startswith("classifier")):
            name = f"{'cls' if 'pooler' in key else 'cls.output'}.{kind}"
        else:
            plain = key.removeprefix("bert.").removeprefix("roberta.")
            name = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        if name == "position_embd.weight":
            values = values[first:]
        one_row = squeezed and values.ndim == 2 and len(values) == 1
        writer.add_tensor(name, (values[0] if one_row else values).numpy())
    add_more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Encoder, EncoderConfig]:
    checkpoint = open_checkpoint(path)
    config = resolve_encoder(checkpoint)
    linears = select_linears(CPU, dtype)
    return Encoder.load(checkpoint, config, linears, dtype=dtype, device=CPU), config


def some_texts(types: bool = False) -> Texts:
    generator = torch.Generator().manual_seed(11)
    # RoBERTa's padding, 1, has no position.
    ids = torch.randint(2, VOCABULARY, (sum(LENGTHS),), generator=generator)
    kinds = torch.randint(0, 2, (sum(LENGTHS),), generator=generator) if types else None
    return Texts(ids, LENGTHS, kinds)


def alone(model: Any, texts: Texts) -> list[Any]:
    """What transformers makes of each text by itself."""
    kinds = torch.zeros_like(texts.token_ids) if texts.types is None else texts.types
    with torch.inference_mode():
        return [
            model(input_ids=ids[None], token_type_ids=types[None])
            for ids, types in zip(
                texts.token_ids.split(list(texts.lengths)),
                kinds.split(list(texts.lengths)),
                strict=True,
            )
        ]


def pooled(hidden: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
    rows = {"mean": lambda h: h.mean(0), "cls": lambda h: h[0], "last": lambda h: h[-1]}
    return torch.stack([rows[kind](each) for each in hidden])


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_each_token_has_the_vector_that_transformers_gives_its_text_alone(
    tmp_path: Path, activation: str
) -> None:
    model = random_model(hidden_act=activation)
    model.save_pretrained(tmp_path)
    encoder, _ = loaded(tmp_path)
    texts = some_texts(types=True)
    expected = torch.cat([each.last_hidden_state[0] for each in alone(model, texts)])
    torch.testing.assert_close(encoder.hidden(texts), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [RobertaModel, XLMRobertaModel, XLMRobertaForMaskedLM])
def test_positions_of_roberta_begin_behind_the_paddings(tmp_path: Path, kind: type[Any]) -> None:
    model = random_model(kind)
    model.save_pretrained(tmp_path)
    encoder, config = loaded(tmp_path)
    assert config.longest_text == POSITIONS - 2
    texts = some_texts()
    inner = getattr(model, "roberta", model)
    expected = torch.cat([each.last_hidden_state[0] for each in alone(inner, texts)])
    torch.testing.assert_close(encoder.hidden(texts), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_a_folder_of_sentence_transformers_says_how_vectors_are_made(
    tmp_path: Path, said: dict[str, Any], kind: str, normalize: bool
) -> None:
    model = random_model()
    model.save_pretrained(tmp_path)
    write_modules(tmp_path, said, *(["Normalize"] if normalize else []))
    encoder, config = loaded(tmp_path)
    assert config.pooling == Pooling(kind, normalize)  # type: ignore[arg-type]
    texts = some_texts()
    expected = pooled([each.last_hidden_state[0] for each in alone(model, texts)], kind)
    got = encoder.vectors(texts, config.pooling)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("pooling_type", "kind"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_a_gguf_file_gives_the_vectors_of_the_folder_it_was_made_of(
    tmp_path: Path, pooling_type: int, kind: str
) -> None:
    model = random_model()
    encoder, config = loaded(write_gguf(model, tmp_path / "bert.gguf", pooling_type))
    assert config.pooling == Pooling(kind)  # type: ignore[arg-type]
    texts = some_texts()
    expected = pooled([each.last_hidden_state[0] for each in alone(model, texts)], kind)
    got = encoder.vectors(texts, config.pooling)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [RobertaModel, XLMRobertaModel])
@pytest.mark.parametrize("squeezed", [False, True])
def test_positions_of_roberta_in_a_gguf_file_begin_at_its_first_row(
    tmp_path: Path, kind: type[Any], squeezed: bool
) -> None:
    model = random_model(kind)
    encoder, config = loaded(write_gguf(model, tmp_path / "a.gguf", 2, squeezed=squeezed))
    assert (config.longest_text, config.token_types) == (POSITIONS - 2, 1)
    assert config.pooling == Pooling("cls")
    texts = some_texts()
    expected = pooled([each.last_hidden_state[0] for each in alone(model, texts)], "cls")
    got = encoder.vectors(texts, config.pooling)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("squeezed", [False, True])
@pytest.mark.parametrize("pooling_type", [4, 0, None])
def test_a_gguf_file_with_a_head_scores(
    tmp_path: Path, pooling_type: int | None, squeezed: bool
) -> None:
    model = random_model(BertForSequenceClassification, num_labels=1)
    path = write_gguf(model, tmp_path / "a.gguf", pooling_type, pooler=True, squeezed=squeezed)
    encoder, config = loaded(path)
    assert (config.pooling, config.labels) == (None, 1)
    texts = some_texts(types=True)
    expected = torch.cat([each.logits for each in alone(model, texts)]).sigmoid()
    torch.testing.assert_close(encoder.scores(texts), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling_type", [4, None])
def test_a_gguf_file_without_a_part_of_its_head_is_refused(
    tmp_path: Path, pooling_type: int | None
) -> None:
    model = random_model(BertForSequenceClassification, num_labels=1)
    with pytest.raises(ModelLoadFailed, match=r"a reranker without cls\.weight"):
        loaded(write_gguf(model, tmp_path / "a.gguf", pooling_type))
    path = write_gguf(model, tmp_path / "b.gguf", 1)
    assert loaded(path)[1].pooling == Pooling("mean"), "the file says what it is for"


def test_a_pooling_that_is_no_number_is_none(tmp_path: Path) -> None:
    path = write_gguf(
        random_model(),
        tmp_path / "m.gguf",
        None,
        add_more=lambda writer: writer.add_array("bert.pooling_type", [1]),
    )
    assert resolve_encoder(open_checkpoint(path)).pooling is None


def with_old_names(folder: Path) -> None:
    """Calls the parts of norms what TensorFlow does, as google-bert/bert-base-uncased has them."""
    file = folder / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {}
    for name, values in load_file(file).items():
        for now, before in old.items():
            name = name.replace(now, before)
        tensors[name] = values
    save_file(tensors, file)


def test_a_folder_converted_from_tensorflow_gives_the_same_states(tmp_path: Path) -> None:
    random_model(BertForPreTraining).save_pretrained(tmp_path)
    texts = some_texts()
    expected = loaded(tmp_path)[0].hidden(texts)
    with_old_names(tmp_path)
    assert torch.equal(loaded(tmp_path)[0].hidden(texts), expected)


def test_a_tensor_with_an_old_name_is_refused_by_the_name_in_the_file(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path)
    with_old_names(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"more.LayerNorm.gamma": torch.ones(64)}, file)
    with pytest.raises(ModelLoadFailed, match=r"a tensor more\.LayerNorm\.gamma"):
        loaded(tmp_path)


def test_native_types_keep_a_vectors_direction(tmp_path: Path) -> None:
    model = random_model()
    model.save_pretrained(tmp_path)
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True})
    encoder, config = loaded(tmp_path, torch.bfloat16)
    assert config.pooling is not None
    texts = some_texts()
    expected = pooled([each.last_hidden_state[0] for each in alone(model, texts)], "mean")
    cosine = torch.cosine_similarity(encoder.vectors(texts, config.pooling), expected)
    assert cosine.min() >= 0.999


def test_a_folder_without_modules_names_no_pooling(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path)
    _, config = loaded(tmp_path)
    assert config.pooling is None
    assert config.longest_text == POSITIONS


def test_a_text_may_be_as_long_as_sentence_transformers_takes(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    assert loaded(tmp_path)[1].longest_text == 20
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 2000}')
    assert loaded(tmp_path)[1].longest_text == POSITIONS


@pytest.mark.parametrize(
    ("pooling", "more", "named"),
    [
        ({"pooling_mode_max_tokens": True}, (), "pooling_mode_max_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, (), "cls_token"),
        ({"pooling_mode": "weightedmean"}, (), "weightedmean"),
        ({"pooling_mode_mean_tokens": False}, (), "none"),
        ({"pooling_mode_mean_tokens": True}, ("Dense",), "Dense"),
    ],
)
def test_a_rule_that_is_not_done_is_refused_by_name(
    tmp_path: Path, pooling: dict[str, Any], more: tuple[str, ...], named: str
) -> None:
    random_model().save_pretrained(tmp_path)
    write_modules(tmp_path, pooling, *more)
    with pytest.raises(ModelLoadFailed, match=named):
        loaded(tmp_path)


def test_the_modules_of_a_truncated_file_are_refused_in_one_sentence(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path)
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True})
    file = tmp_path / "modules.json"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ModelLoadFailed, match=r"modules\.json is not valid JSON; download"):
        resolve_encoder(open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("Pooling", "{outside}"),
        ("Pooling", "../outside"),
        ("Pooling", "1_Pooling/../../outside"),
        ("Pooling", ""),
        ("Transformer", "0_Transformer"),
    ],
)
def test_a_module_elsewhere_is_refused_by_its_path(tmp_path: Path, kind: str, path: str) -> None:
    folder, outside = tmp_path / "model", tmp_path / "outside"
    random_model().save_pretrained(folder)
    write_modules(folder, {"pooling_mode_mean_tokens": True})
    shutil.copytree(folder / "1_Pooling", outside)
    file, path = folder / "modules.json", path.format(outside=outside)
    modules = json.loads(file.read_text())
    next(each for each in modules if each["type"].endswith(kind))["path"] = path
    file.write_text(json.dumps(modules))
    with pytest.raises(ModelLoadFailed, match=f"its {kind} in '{re.escape(path[:20])}"):
        resolve_encoder(open_checkpoint(folder))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "swish"}, "hidden_act"),
        ({"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering"),
        ({"architectures": "BertForQuestionAnswering"}, "BertForQuestionAnswering"),
        ({"architectures": 7}, "its architecture is 7"),
        ({"num_attention_heads": 7}, "7 heads"),
        ({"num_hidden_layers": 2}, "encoder.layer.2"),
        ({"num_hidden_layers": 4}, "encoder.layer.3"),
        ({"hidden_size": 128}, "[300, 64]"),
    ],
)
def test_a_graph_that_is_not_done_is_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    random_model().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(ModelLoadFailed) as refused:
        loaded(tmp_path)
    assert named in str(refused.value)


def test_a_folder_that_names_no_activation_has_berts(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": None}))
    assert resolve_encoder(open_checkpoint(tmp_path)).activation == "gelu"


@pytest.mark.parametrize(
    ("said", "squashed"),
    [
        ({}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
        ({"sentence_transformers": {"activation_fn": "x.activation.Sigmoid"}}, True),
    ],
)
def test_a_cross_encoder_scores_as_its_files_say(
    tmp_path: Path, said: dict[str, Any], squashed: bool
) -> None:
    model = random_model(BertForSequenceClassification, num_labels=1)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    encoder, _ = loaded(tmp_path)
    texts = some_texts(types=True)
    logits = torch.cat([each.logits for each in alone(model, texts)])
    expected = logits.sigmoid() if squashed else logits
    torch.testing.assert_close(encoder.scores(texts), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("labels", "said", "reason"),
    [
        (3, {}, "a head of 3 labels"),
        (1, {"sentence_transformers": {"activation_fn": "a.b.Tanh"}}, "pass through Tanh"),
    ],
)
def test_a_head_that_is_not_done_is_refused_by_name(
    tmp_path: Path, labels: int, said: dict[str, Any], reason: str
) -> None:
    random_model(BertForSequenceClassification, num_labels=labels).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    with pytest.raises(ModelLoadFailed, match=reason):
        resolve_encoder(open_checkpoint(tmp_path))


def test_a_head_of_one_number_is_refused(tmp_path: Path) -> None:
    random_model(BertForSequenceClassification, num_labels=1).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"classifier.weight": torch.tensor(1.0)}, file)
    with pytest.raises(ModelLoadFailed, match=r"classifier\.weight is \[\] but"):
        loaded(tmp_path)


def test_a_prompt_before_each_text_is_refused_by_its_name(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path)
    said = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text(json.dumps(said))
    with pytest.raises(ModelLoadFailed, match="puts the prompt 'query' before each text"):
        resolve_encoder(open_checkpoint(tmp_path))
    file.write_text(json.dumps(said | {"default_prompt_name": None}))
    assert resolve_encoder(open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    "kind", [RobertaForSequenceClassification, XLMRobertaForSequenceClassification]
)
@pytest.mark.parametrize("squeezed", [None, False, True])
def test_a_cross_encoder_of_roberta_scores_by_its_head(
    tmp_path: Path, kind: type[Any], squeezed: bool | None
) -> None:
    model = random_model(kind, num_labels=1)
    path = tmp_path
    if squeezed is None:
        model.save_pretrained(tmp_path)
    else:
        path = write_gguf(model, tmp_path / "a.gguf", 4, squeezed=squeezed)
    encoder, _ = loaded(path)
    texts = some_texts(types=True)
    plain = Texts(texts.token_ids, LENGTHS)
    expected = torch.cat([each.logits for each in alone(model, plain)]).sigmoid()
    # It has one type of tokens, whichever text of a pair they are of.
    torch.testing.assert_close(encoder.scores(texts), expected, atol=1e-5, rtol=1e-5)
