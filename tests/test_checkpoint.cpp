// SPDX-License-Identifier: Apache-2.0
// Checkpoints: reading and writing .pth files, malicious and damaged files, loading weights by name,
// metadata. Also weights/get.
#include "programs.hpp"

#include <caffe2/serialize/inline_container.h>
#include <sys/stat.h>

#include <random>

#include "checkpoint/checkpoint.hpp"
#include "checkpoint/load.hpp"
#include "models.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

void write_bytes(const std::string& path, std::string_view bytes) {
  std::filesystem::remove(path);  // rewriting a truncated file makes ext4 wait for the disk
  std::ofstream(path, std::ios::binary).write(bytes.data(), bytes.size());
}

using Records = std::vector<std::pair<std::string, std::string>>;

std::string zip_bytes(const Records& records) {
  std::string out;
  caffe2::serialize::PyTorchStreamWriter zip([&](const void* bytes, size_t count) {
    out.append(static_cast<const char*>(bytes), count);
    return count;
  });
  for (const auto& [name, data] : records) zip.writeRecord(name, data.data(), data.size());
  zip.writeEndOfFile();
  return out;
}

// Reads a .pth file with this pickle program and additional records.
c10::IValue read_pickle(const std::string& program, Records records = {}) {
  const TempDir dir;
  records.insert(records.begin(), {"data.pkl", program});
  write_bytes(dir / "a.pth", zip_bytes(records));
  return read_pth(dir / "a.pth");
}

// Checks that the expression throws an error of one line with this part.
#define CHECK_ERROR(expression, part)                       \
  do {                                                      \
    const std::string what = error_of([&] { expression; }); \
    CHECK_MESSAGE(has(what, part), "said: ", what);         \
    CHECK_FALSE(has(what, "\n"));                           \
    CHECK(what.size() < 2000);                              \
  } while (0)

bool same(const torch::Tensor& a, const torch::Tensor& b) { return a.dtype() == b.dtype() && a.equal(b); }

std::string text(const std::string& s) {  // BINUNICODE
  std::string out = "X";
  append_number(out, uint32_t(s.size()));
  return out + s;
}
std::string number(int64_t value) {  // LONG1
  std::string out = "\x8a\x08";
  append_number(out, value);
  return out;
}
std::string tuple(const std::vector<int64_t>& values) {
  std::string out = "(";
  for (const int64_t value : values) out += number(value);
  return out + "t";
}
const std::string kProto("\x80\x02", 2);
// A float tensor over record data/0
std::string tensor_program(int64_t count, int64_t offset, const std::vector<int64_t>& sizes,
                           const std::vector<int64_t>& strides) {
  const std::string storage =
      "(" + text("storage") + "ctorch\nFloatStorage\n" + text("0") + text("cpu") + number(count) + "tQ";
  return kProto + "ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + tuple(sizes) +
         tuple(strides) + "\x89" + "}tR.";
}

// Returns a value with all types that a checkpoint may contain.
GenericDict sample() {
  auto weights = empty_dict(), file = empty_dict();
  const auto base = torch::arange(24, torch::kFloat);
  weights.insert("plain", base.view({2, 3, 4}));
  weights.insert("shared", base.slice(0, 4, 10));
  weights.insert("transposed", base.view({4, 6}).t());
  weights.insert("channels_last", torch::randn({2, 3, 4, 5}).contiguous(torch::MemoryFormat::ChannelsLast));
  weights.insert("one_by_one", torch::randn({8, 3, 1, 1}).contiguous(torch::MemoryFormat::ChannelsLast));
  weights.insert("expanded", torch::ones({1}).expand({3, 2}));
  weights.insert("gradient", torch::ones({2}).requires_grad_());
  weights.insert("empty", torch::empty({0, 3}));
  weights.insert("steps", torch::tensor(7, torch::kLong));
  for (const auto type : {torch::kHalf, torch::kBFloat16, torch::kDouble, torch::kInt, torch::kShort,
                          torch::kChar, torch::kByte, torch::kBool})
    weights.insert(c10::toString(type), torch::tensor({0, 1, 3}).to(type));
  auto list = empty_list();
  for (const auto& item : std::vector<c10::IValue>{1, 2.5, "x", true, {}}) list.push_back(item);
  file.insert("model", weights);
  file.insert("list", list);
  file.insert("tuple", c10::ivalue::Tuple::create({int64_t(1), "two"}));
  file.insert("ints", std::vector<int64_t>{-1, 255, 65536, int64_t(1) << 40, INT64_MIN});
  file.insert("floats", std::vector<double>{0.1, -1e300, INFINITY});
  file.insert("none", c10::IValue());
  file.insert("name", "caf\xC3\xA9");
  file.insert(int64_t(3), "by number");
  return file;
}

void check_sample(const c10::IValue& value, const GenericDict& expected) {
  const auto file = value.toGenericDict();
  CHECK(difference(file, expected) == "");
  CHECK(file.at("tuple").toTupleRef().elements()[1].toStringRef() == "two");
  for (const auto& entry : file.at("model").toGenericDict()) {
    const auto got = entry.value().toTensor();
    INFO(entry.key().toStringRef());
    CHECK(same(got, expected.at("model").toGenericDict().at(entry.key()).toTensor()));
    CHECK(got.is_contiguous());
    CHECK(!got.requires_grad());
    CHECK(got.device().is_cpu());
  }
}

GenericDict under(const std::string& key, const c10::IValue& value) {
  auto dict = empty_dict();
  dict.insert(key, value);
  return dict;
}

}  // namespace

TEST_CASE("checkpoints: a file is read as it was written") {
  const TempDir dir;
  const auto value = sample();
  write_pth(dir / "a.pth", value);
  check_sample(read_pth(dir / "a.pth"), value);

  // torch's own reader reads the same values.
  const std::string bytes = contents(dir / "a.pth");
  const auto theirs =
      torch::pickle_load({bytes.begin(), bytes.end()}).toGenericDict().at("model").toGenericDict();
  for (const auto& entry : value.at("model").toGenericDict())
    CHECK(same(theirs.at(entry.key()).toTensor(), entry.value().toTensor()));

  // Equal contents give equal bytes under any file name. Data is aligned to 64 bytes.
  write_pth(dir / "b.pth", value);
  CHECK(contents(dir / "b.pth") == bytes);
  write_pth(dir / "c.pth", torch::full({1}, 0x41424344, torch::kInt));
  CHECK(contents(dir / "c.pth").find("DCBA") % 64 == 0);

  // Tensors own their memory, so that later changes of the file do not affect them.
  const auto read = read_pth(dir / "a.pth");
  write_bytes(dir / "a.pth", "gone");
  check_sample(read, value);

  CHECK_ERROR(write_pth(dir / "d.pth", c10::IValue(torch::Device("cpu"))), "cannot store a Device");
  CHECK_ERROR(write_pth(dir / "d.pth", torch::ones({2, 2}).to_sparse()), "sparse");
}

PROGRAM_TEST("checkpoints: Python reads files of write_pth(), and read_pth() reads files of torch.save()") {
  if (cached_python_with("torch").empty()) {
    MESSAGE("skipped: no Python with torch (set PYTHON)");
    return;
  }
  const TempDir dir;
  write_pth(dir / "cpp.pth", sample());
  write_bytes(dir / "script.py", R"(
import argparse, collections, torch
for options in ({}, {'mmap': True}):
  f = torch.load('cpp.pth', weights_only=True, **options)
  m = f['model']
  base = torch.arange(24.)
  assert m['plain'].equal(base.view(2, 3, 4)) and m['shared'].equal(base[4:10]) and m['transposed'].equal(base.view(4, 6).t())
  assert m['channels_last'].shape == (2, 3, 4, 5) and m['channels_last'].is_contiguous()
  assert m['empty'].shape == (0, 3) and m['steps'].shape == () and m['steps'] == 7 and m['steps'].dtype == torch.int64
  assert m['Half'].dtype == torch.half and m['BFloat16'].dtype == torch.bfloat16 and m['Bool'].tolist() == [False, True, True]
  assert not m['gradient'].requires_grad
  assert f['list'] == [1, 2.5, 'x', True, None] and f['tuple'] == (1, 'two') and f['name'] == 'caf\u00e9' and f[3] == 'by number'
  assert f['ints'] == [-1, 255, 65536, 2**40, -2**63] and f['floats'] == [0.1, -1e300, float('inf')]
  assert list(f)[:3] == ['model', 'list', 'tuple']

net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
value = {
  'model': net.state_dict(), 'parameter': torch.nn.Parameter(torch.ones(2)),
  'base': base, 'view': base.view(4, 6).t()[1:3], 'channels_last': torch.arange(24.).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
  'size': torch.Size([2, 3]), 'long': 2**70, 'negative': -2**40, 'set': {1, 2}, 'bytes': b'abc\xff',
  'args': argparse.Namespace(lr=0.1), 'default': collections.defaultdict(list, {'a': [1]}), 'pairs': collections.OrderedDict(a=1, b=2),
  'text': 'caf\u00e9', 'half': torch.tensor([1.5]).half(), 'odd_keys': {(1, 2): 3},
  'float8': torch.ones(2).to(torch.float8_e5m2),
}
torch.save(value, 'python.pth')
torch.save(value, 'four.pth', pickle_protocol=4)
torch.save(value, 'legacy.pth', _use_new_zipfile_serialization=False)
torch.jit.save(torch.jit.script(net), 'script.pth')
torch.save(base.to(torch.float64).expand(5, 24), 'expanded.pth')
)");
  REQUIRE(shell(dir, cached_python_with("torch") + " script.py").code == 0);
  const auto file = read_pth(dir / "python.pth").toGenericDict();
  CHECK(file.at("model").toGenericDict().begin()->key().toStringRef() == "0.weight");
  CHECK(same(file.at("parameter").toTensor(), torch::ones({2})));
  const auto base = file.at("base").toTensor(), view = file.at("view").toTensor();
  CHECK(same(view, base.view({4, 6}).t().slice(0, 1, 3)));
  base.zero_();
  CHECK(view.abs().sum().item<float>() == 0);  // views share their storage as before
  CHECK(same(file.at("channels_last").toTensor(), torch::arange(24, torch::kFloat).view({1, 2, 3, 4})));
  CHECK(same(file.at("half").toTensor(), torch::tensor({1.5}).to(torch::kHalf)));
  CHECK(file.at("size").toTupleRef().elements()[1].toInt() == 3);
  CHECK(file.at("negative").toInt() == -(int64_t(1) << 40));
  CHECK(file.at("pairs").toGenericDict().at("b").toInt() == 2);
  CHECK(file.at("text").toStringRef() == "caf\xC3\xA9");
  CHECK(describe(file.at("args")) == "the Python object argparse.Namespace");
  CHECK(file.at("odd_keys").toGenericDict().empty());
  for (const char* key : {"long", "set", "bytes", "default", "float8"})
    CHECK_MESSAGE(file.at(key).isCapsule(), key);
  CHECK_ERROR(read_pth(dir / "four.pth"), "has pickle protocol 4");
  CHECK_ERROR(read_pth(dir / "legacy.pth"), "before PyTorch 1.6");
  CHECK_ERROR(read_pth(dir / "script.pth"), "TorchScript");
  CHECK(read_pth(dir / "expanded.pth").toTensor().sizes() == c10::IntArrayRef({5, 24}));
}

TEST_CASE("checkpoints: the error of a file of another kind names its kind") {
  const TempDir dir;
  const auto refuse = [&](const std::string& bytes, const std::string& part) {
    write_bytes(dir / "x.pth", bytes);
    CHECK_ERROR(read_pth(dir / "x.pth"), part);
    CHECK_ERROR(read_pth(dir / "x.pth"), "x.pth: ");
  };
  for (const auto& [bytes, part] :
       {std::pair<std::string, const char*>("", "empty"),
        {"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"},
        {"<!DOCTYPE html><html>", "web page"},
        {{"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 j\xa8P\x19.", 16}, "before PyTorch 1.6"},
        {"hello", "not a .pth file"},
        {"PK\x03\x04", "incomplete"},
        {zip_bytes({{"arr_0.npy", "x"}}), "without data.pkl"},
        {zip_bytes({{"data.pkl", kProto + "N."}, {"byteorder", "big"}}), "big-endian"}})
    refuse(bytes, part);
  CHECK_ERROR(read_pth(dir.path.string()), "is not a regular file");
  REQUIRE(mkfifo((dir / "pipe.pth").c_str(), 0600) == 0);  // opening it would block
  CHECK_ERROR(read_pth(dir / "pipe.pth"), "is not a regular file");
  CHECK_ERROR(read_pth(dir / "none.pth"), "does not exist");
  // Without checksums, as written after torch.serialization.set_crc32_options(False).
  std::string bytes = zip_bytes({{"data.pkl", kProto + "N."}});
  const size_t crc = bytes.find("PK\x01\x02") + 16;
  std::fill_n(bytes.begin() + crc, 4, '\0');
  write_bytes(dir / "x.pth", bytes);
  CHECK(read_pth(dir / "x.pth").isNone());
  bytes[crc] = 1;
  refuse(bytes, "checksum");
}

TEST_CASE("checkpoints: pickles execute no code, and tensors that exceed their storage are refused") {
  // os.system("touch ran") is read as a name and not executed.
  const TempDir dir;
  const auto value = read_pickle(kProto + "cposix\nsystem\n" + text("touch " + (dir / "ran")) + "\x85R.");
  CHECK(describe(value) == "the Python object posix.system");
  CHECK(!std::filesystem::exists(dir / "ran"));
  // Tensors that exceed their storage.
  const int64_t huge = int64_t(1) << 62;
  const Records records = {{"data/0", std::string(16, '\0')}};
  CHECK(read_pickle(tensor_program(4, 0, {2, 2}, {2, 1}), records).toTensor().numel() == 4);
  CHECK(read_pickle(tensor_program(4, 0, {}, {}), records).toTensor().dim() == 0);
  CHECK(read_pickle(tensor_program(4, 0, {0, 3}, {3, 1}), records).toTensor().numel() == 0);
  for (const auto& program :
       {tensor_program(4, 0, {5}, {1}), tensor_program(4, 1, {4}, {1}), tensor_program(4, 4, {}, {}),
        tensor_program(4, -1, {1}, {1}), tensor_program(4, 0, {2}, {huge}), tensor_program(4, 0, {2}, {-1}),
        tensor_program(4, 0, {2, 2}, {huge, huge}), tensor_program(4, 0, {-1}, {1}),
        tensor_program(4, 0, {2}, {}), tensor_program(5, 0, {5}, {1}), tensor_program(-1, 0, {1}, {1})})
    CHECK_ERROR(read_pickle(program, records), "damaged");
  CHECK_ERROR(read_pickle(tensor_program(4, 0, {4}, {1})), "data/0 is missing");
  for (const char* program :
       {"X\xff\xff\xff\xff", "cno_end", "J\x01", ".", "t.", "K\x01s.", "NR.", "]NNs.", "}(K\x01u.", "NQ.",
        "h\x07.", "(R.", "\xff.", "ctorch._utils\n_rebuild_tensor_v2\n)R."})
    CHECK_ERROR(read_pickle(kProto + program), "damaged");
}

TEST_CASE("checkpoints: truncated files are refused; random changes cause an error or a value, no crash") {
  const TempDir dir;
  write_pth(dir / "a.pth", sample());
  const std::string good = contents(dir / "a.pth");
  std::mt19937_64 random(1);
  const auto refused = [&](const std::string& bytes) {
    write_bytes(dir / "b.pth", bytes);
    const std::string error = error_of([&] { read_pth(dir / "b.pth"); });
    CHECK_MESSAGE((error.empty() || has(error, "b.pth: ")), error);
    return !error.empty();
  };
  for (size_t i = 1; i <= 200; ++i)
    CHECK(refused(good.substr(0, i <= 120 ? good.size() - i : random() % good.size())));
  for (int i = 0; i < 400; ++i) {  // bit flips, half of them in the zip directory
    std::string bytes = good;
    const size_t from = i % 2 ? bytes.find("PK\x01\x02") : 0;
    bytes[from + random() % (bytes.size() - from)] ^= char(1 << random() % 8);
    refused(bytes);
  }
}

TEST_CASE("checkpoints: weights are loaded by name, and the rest is reported") {
  const TempDir dir;
  const std::string stem = "backbone.backbone.stem.conv.conv.weight", head = "head.cls_preds.0.weight";
  torch::manual_seed(1);
  YOLOX from = make_model("yolox-nano", 5), to = make_model("yolox-nano", 5),
        other = make_model("yolox-nano", 3);
  for (Tensor& buffer : from->buffers()) buffer.fill_(9);

  write_pth(dir / "a.pth", under("model", to_dict(state_dict(*from))));
  const auto report = load_state_dict(*to, find_weights(read_pth(dir / "a.pth"), "a.pth"), "a.pth");
  CHECK(report.complete());
  CHECK(to_string(report) == "loaded 642 of 642 tensors");
  const auto a = state_dict(*from), b = state_dict(*to);
  for (size_t i = 0; i < a.size(); ++i) CHECK(same(a[i].second, b[i].second));
  CHECK(to->parameters()[0].requires_grad());  // the tensor is copied into, not replaced

  // Prefix "module.", half precision, an unexpected key, a missing key, another number of classes.
  auto odd = empty_dict();
  for (const auto& [key, tensor] : a)
    if (key != stem)
      odd.insert("module." + key, tensor.is_floating_point() ? tensor.to(torch::kHalf) : tensor);
  odd.insert("module.head.extra.weight", torch::ones({1}));
  const Tensor before = other->named_parameters()[head].clone();
  const auto partial = load_state_dict(*other, odd, "odd.pth");
  CHECK(partial.loaded.size() == 635);
  CHECK(partial.missing == std::vector{stem});
  CHECK(partial.unexpected == std::vector<std::string>{"head.extra.weight"});
  REQUIRE(partial.mismatched.size() == 6);
  CHECK(partial.mismatched[0] == head + ": file [5, 64, 1, 1], model [3, 64, 1, 1]");
  CHECK(other->named_parameters()[head].equal(before));
  const auto reg = [](const YOLOX& model) { return model->named_parameters()["head.reg_preds.0.weight"]; };
  CHECK(same(reg(other), reg(from).to(torch::kHalf).to(torch::kFloat)));
  CHECK(other->buffers().back().item<double>() == 9);
  for (const char* line :
       {"loaded 635 of 642 tensors\n",
        "of another shape: 6 (head.cls_preds.0.weight: file [5, 64, 1, 1], model [3, 64, 1, 1], head.",
        ", ...): left at", "\nnot in the file: 1 (backbone.backbone.stem.conv.conv.weight): ",
        "\nonly in the file: 1 (head.extra.weight): "})
    CHECK_HAS(to_string(partial), line);

  CHECK_ERROR(load_state_dict(*to, under("layer1.weight", torch::ones({1})), "f.pth"),
              "f.pth: no entry fits the model: the file has layer1.weight, ..., the model backbone.");
  auto object = under(head, torch::zeros({5, 64, 1, 1}));
  object.insert(stem, c10::IValue::make_capsule(c10::make_intrusive<Opaque>("torch.QInt8Storage")));
  CHECK_ERROR(load_state_dict(*to, object, "f.pth"), stem + " is the Python object torch.QInt8Storage");
  CHECK(to->named_parameters()[head].equal(from->named_parameters()[head]));
}

TEST_CASE("checkpoints: weights are found under model, state_dict or ema, or at the top level") {
  const auto weights = under("w", torch::ones({1}));
  for (const char* key : {"model", "state_dict", "ema"})
    CHECK(find_weights(under(key, weights), "f").contains("w"));
  CHECK(find_weights(under("model", torch::ones({1})), "f").contains("model"));  // a flat dict has any names
  auto both = under("model", {});
  both.insert("ema", weights);
  CHECK(find_weights(both, "f").contains("w"));
  const auto object = c10::IValue::make_capsule(c10::make_intrusive<Opaque>("ultralytics.DetectionModel"));
  for (const auto& row : std::vector<std::pair<c10::IValue, std::string>>{
           {1, "f.pth: contains the number 1"},
           {empty_dict(), "its entries are none"},
           {under("epoch", 1), "its entries are epoch: the number 1"},
           {under("model", object), "model: the Python object ultralytics.DetectionModel"}})
    CHECK_ERROR(find_weights(row.first, "f.pth"), row.second);
}

TEST_CASE("checkpoints: class names, channel order and value range are stored with the weights") {
  const TempDir dir;
  for (const bool legacy : {false, true}) {
    WeightsInfo info{"yolox-nano", {"cat", "caf\xC3\xA9"}, 416, 640, legacy};
    write_pth(dir / "a.pth", under("yolox", to_dict(info)));
    const auto read = weights_info(read_pth(dir / "a.pth"), "a.pth");
    CHECK(read.model == info.model);
    CHECK(read.classes == info.classes);
    CHECK(read.height == 416);
    CHECK(read.width == 640);
    CHECK(read.legacy_preproc == legacy);
  }
  const auto missing = weights_info(empty_dict(), "a.pth");
  CHECK(missing.classes.empty());
  CHECK(!missing.legacy_preproc);

  const auto with = [&](const char* key, const c10::IValue& value) {
    auto dict = to_dict(WeightsInfo{"yolox-s", {"a"}, 32, 32, false});
    dict.insert_or_assign(key, value);
    return under("yolox", dict);
  };
  CHECK(weights_info(with("value_range", 255), "f").model == "yolox-s");
  CHECK_ERROR(weights_info(with("channel_order", "RGB"), "f.pth"),
              "f.pth: its weights need RGB pixels of 0..255");
  CHECK_ERROR(weights_info(with("value_range", 1.0), "f.pth"), "BGR pixels of 0..1");
  CHECK_ERROR(weights_info(with("mean", std::vector<double>{1, 2, 3}), "f.pth"), "mean [1, 2, 3]");
  CHECK_ERROR(weights_info(with("classes", 3), "f.pth"), "f.pth: the entry \"yolox\" is damaged");
  CHECK_ERROR(weights_info(with("size", std::vector<int64_t>{-32, 32}), "f.pth"), "is damaged");
}

SHARED_TEST("checkpoints: official checkpoints are read completely") {
  const auto file = read_pth(shared("fixtures/ckpt_nano.pth")).toGenericDict();
  CHECK(file.at("start_epoch").toInt() == 3);
  CHECK(file.at("best_ap").toDouble() == 0.25);
  const auto weights = find_weights(file, "ckpt_nano.pth");
  const auto steps = fixture("steps_nano.pth");
  CHECK(weights.size() == 642);
  // The checkpoint holds the EMA weights after the third step.
  for (const auto& entry : weights)
    CHECK(entry.value().toTensor().equal(tensor(steps, "ema_step2/" + entry.key().toStringRef())));
  const auto state = file.at("optimizer").toGenericDict().at("state").toGenericDict();
  CHECK(state.at(int64_t(0)).toGenericDict().at("momentum_buffer").isTensor());
  const auto numpy = read_pth(shared("fixtures/ckpt_npfloat_truncated.pth")).toGenericDict();
  CHECK(numpy.at("best_ap").isCapsule());
  CHECK(find_weights(numpy, "f").size() == 7);
}

// ---- weights/get

PROGRAM_TEST("weights: get checks a download and resumes a partial one; files that exist are not changed" *
             doctest::skip(std::system("command -v curl >/dev/null 2>&1") != 0)) {
  const TempDir dir;
  const std::string file = dir / "weights/yolox_nano.pth", served = dir / "server/yolox_nano.pth";
  const std::string bytes = concat(std::string(150000, 'a'), std::string(150000, 'b'));
  write_text(served, bytes);
  write_text(dir / "weights/get");
  fs::copy_file(YOLOX_SOURCE_DIR "/weights/get", dir / "weights/get", fs::copy_options::overwrite_existing);
  REQUIRE(shell(dir, "(cd server && sha256sum yolox_nano.pth >../weights/SHA256SUMS)").code == 0);
  std::string url = "file://" + (dir / "server");
  const auto get = [&](const std::string& names = "yolox-nano") {
    return shell(dir, "YOLOX_WEIGHTS_URL=" + url + " weights/get " + names);
  };
  CHECK_HAS(get().out, "300000 bytes, SHA-256 is right");
  for (const size_t had : {150000, 300000}) {
    fs::remove(file);
    write_text(file + ".part", bytes.substr(0, had));
    CHECK(get().code == 0);
    CHECK(contents(file) == bytes);
    CHECK_FALSE(fs::exists(file + ".part"));
  }
  url = "http://127.0.0.1:9";  // no server is needed, and there is none
  CHECK_HAS(get().out, "exists, SHA-256 is right");
  write_text(file, "mine");  // a file of that name that was trained here
  CHECK_HAS(get().err, "yolox_nano.pth is not the official file");
  CHECK(contents(file) == "mine");
  fs::remove(file);
  CHECK_HAS(get().err, "cannot download http://127.0.0.1:9/yolox_nano.pth: no network, or the connection");
  url = "file://" + (dir / "server");
  write_text(served, "a page of a proxy");
  CHECK_HAS(get().err, "is not the official file");
  CHECK_FALSE(fs::exists(file));
  fs::remove(served);
  write_text(file + ".part", "begun");
  CHECK(get().code == 1);
  CHECK(contents(file + ".part") == "begun");
  CHECK(get("yolox.nano").code == 2);  // a name is not a regular expression
  CHECK_HAS(get("yolox-z").err, "'yolox-z' is not an official model");
}

TEST_CASE("weights: all six models have hashes; the message about missing weights names weights/get") {
  const std::string sums = contents(YOLOX_SOURCE_DIR "/weights/SHA256SUMS");
  const TempDir dir;
  for (const std::string size : {"nano", "tiny", "s", "m", "l", "x"}) {
    const std::string file = "yolox_" + size + ".pth";
    CHECK_HAS(sums, "  " + file + "\n");
    CHECK_HAS(error_of([&] { read_weights(dir / file); }), file + " is missing; weights/get yolox-" + size);
  }
  const Env folder("YOLOX_WEIGHTS_DIR", dir.path.c_str());
  CHECK_HAS(error_of([] { read_weights("yolox-s"); }), "yolox_s.pth is missing; weights/get yolox-s");
  write_text(dir / "yolox_s.pth", "words");
  CHECK_HAS(error_of([&] { read_weights("yolox-s"); }), "not a .pth file");
  CHECK_HAS(error_of([] { read_weights("yolox-z"); }),
            "--weights yolox-z is neither a file nor an official model (yolox-nano, yolox-tiny");
}
