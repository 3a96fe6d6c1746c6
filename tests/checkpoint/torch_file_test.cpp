#include <caffe2/serialize/inline_container.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <paceline/checkpoint.h>
#include <paceline/error.h>

#include "checkpoint/expected_tensors.h"
#include "support/temporary_directory.h"

namespace paceline {
namespace {

namespace fs = std::filesystem;
using test::expect_same;
using test::kPythonsTypes;
using test::numbers;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const fs::path kFiles = FILES_DIRECTORY;

class TorchFiles : public ::testing::Test {
 protected:
  fs::path path(const char* name = "x.pt") const { return directory_.path() / name; }
  void write(const std::string& content, const char* name = "x.pt") const {
    std::ofstream(path(name), std::ios::binary) << content;
  }

  test::TemporaryDirectory directory_;
};

std::string content_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void expect_tensors(const StateDict& state) {
  for (const auto& [name, type] : kPythonsTypes) expect_same(state[name], numbers(type), name);
  expect_same(state["complex128"], numbers(at::kComplexDouble), "complex128");
  expect_same(state["scalar"], at::tensor(2.5F).squeeze(), "scalar");
  EXPECT_EQ(state["empty"].sizes(), at::IntArrayRef({0, 4}));
  const at::Tensor base = at::arange(12.0).reshape({3, 4}).to(at::kFloat);
  expect_same(state["base"], base, "base");
  expect_same(state["part"], base.slice(0, 1).slice(1, 0, 4, 2), "part");
  expect_same(state["transposed"], base.t(), "transposed");
  expect_same(state["parameter"], at::arange(2).to(at::kFloat), "parameter");
  expect_same(state["conjugate"].resolve_conj(), at::tensor({c10::complex<float>(1, -2)}),
              "conjugate");
  expect_same(state["negative"].resolve_neg(), at::tensor({-2.0F}), "negative");
}

TEST_F(TorchFiles, OfPythonAreRead) {
  expect_tensors(paceline::load(kFiles / "tensors.pt"));
}

TEST_F(TorchFiles, KeepWhichTensorsShareMemoryAndNeedGradients) {
  const auto tensors = pickle_load(kFiles / "tensors.pt").toGenericDict();
  tensors.at("base").toTensor()[1][0] = 100;
  EXPECT_EQ(tensors.at("part").toTensor()[0][0].item<float>(), 100);
  EXPECT_EQ(tensors.at("transposed").toTensor()[0][1].item<float>(), 100);
  EXPECT_TRUE(tensors.at("parameter").toTensor().requires_grad());
  EXPECT_FALSE(tensors.at("frozen").toTensor().requires_grad());
  EXPECT_FALSE(paceline::load(kFiles / "tensors.pt")["parameter"].requires_grad());
}

TEST_F(TorchFiles, GiveValuesAsLibTorchHasThem) {
  for (const char* const name : {"values.pt", "protocol4.pt"}) {
    const auto values = pickle_load(kFiles / name).toGenericDict();
    EXPECT_TRUE(values.at("none").isNone());
    EXPECT_TRUE(values.at("flags").toListRef()[0].toBool());
    EXPECT_FALSE(values.at("flags").toListRef()[1].toBool());
    const std::vector<std::int64_t> integers{
        0, 255, 256, 65536, -1, std::int64_t{1} << 40, std::numeric_limits<std::int64_t>::min()};
    for (std::size_t i = 0; i < integers.size(); ++i) {
      EXPECT_EQ(values.at("integers").toTupleRef().elements()[i].toInt(), integers[i]);
    }
    EXPECT_EQ(values.at("real").toDouble(), 2.5);
    EXPECT_EQ(values.at("text").toStringRef(), "Grüße");
    EXPECT_EQ(values.at("bytes").toStringRef(), std::string("\0a\xff", 3));
    EXPECT_EQ(values.at("size").toTupleRef().elements()[1].toInt(), 3);
    EXPECT_EQ(values.at("dtype").toScalarType(), at::kBFloat16);
    EXPECT_EQ(values.at("device").toDevice(), at::Device(at::kCUDA, 1));
    EXPECT_EQ(values.at("ordered").toGenericDict().begin()->key().toStringRef(), "b");
    EXPECT_EQ(values.at("counter").toGenericDict().at("a").toInt(), 2);
    EXPECT_EQ(values.at("set").toListRef()[0].toInt(), 5);
    EXPECT_EQ(values.at("frozen").toListRef()[0].toInt(), 6);
    EXPECT_EQ(values.at("bytearray").toStringRef(), std::string("\0\xff", 2));
    EXPECT_EQ(values.at("no bytes").toStringRef(), "");
    EXPECT_EQ(values.at("no bytearray").toStringRef(), "");
    EXPECT_EQ(values.at("complex").toComplexDouble(), c10::complex<double>(1, 2));
    EXPECT_EQ(values.at("empty").toListRef().size(), 4U);
    const auto several = values.at("several").toListRef();
    EXPECT_TRUE(several[0].is(several[1]));
    EXPECT_EQ(values.at(3).toStringRef(), "three");
    EXPECT_EQ(values.at(0.5).toStringRef(), "half");
  }
}

struct NetImpl : torch::nn::Module {
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(3, 2))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(2))};
  torch::nn::Linear no_bias{
      register_module("no_bias", torch::nn::Linear(torch::nn::LinearOptions(2, 1).bias(false)))};
  torch::Tensor kept = register_buffer("kept", torch::zeros({1}));
};
TORCH_MODULE(Net);

// As files/make_pt sets them.
void expect_net(const NetImpl& net) {
  std::int64_t i = 0;
  for (const auto& parameter : net.parameters()) {
    expect_same(parameter,
                at::arange(parameter.numel()).reshape(parameter.sizes()).to(at::kFloat) + 10 * i++,
                "net");
  }
  EXPECT_EQ(net.kept.item<float>(), 7);
}

TEST_F(TorchFiles, OfAStateDictAndOfAWholeModuleAreReadIntoAModule) {
  for (const char* const name : {"state_dict.pt", "module.pt"}) {
    EXPECT_THAT(paceline::load(kFiles / name).keys(),
                ElementsAre("kept", "linear.weight", "linear.bias", "norm.weight", "norm.bias",
                            "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
                            "no_bias.weight"));
    Net net;
    paceline::load(*net, kFiles / name);
    expect_net(*net);
  }
}

TEST_F(TorchFiles, OfAWholeModuleHaveItsAttributes) {
  const auto module = pickle_load(kFiles / "module.pt").toGenericDict();
  EXPECT_EQ(module.at("__class__").toStringRef(), "__main__.Net");
  EXPECT_EQ(module.at("options").toGenericDict().at("width").toInt(), 3);
  EXPECT_EQ(module.at("_modules").toGenericDict().at("linear").toGenericDict().at("in_features"),
            3);
}

TEST_F(TorchFiles, OfATrainingHaveTheStatesOfOptimizerAndSchedule) {
  const auto training = pickle_load(kFiles / "training.pt").toGenericDict();
  EXPECT_EQ(training.at("epoch").toInt(), 2);
  EXPECT_EQ(state_dict(training.at("model")).size(), 9U);
  const auto adam = training.at("optimizer").toGenericDict();
  const auto first = adam.at("state").toGenericDict().at(0).toGenericDict();
  EXPECT_EQ(first.at("step").toTensor().item<float>(), 2);
  EXPECT_EQ(first.at("exp_avg").toTensor().sizes(), at::IntArrayRef({2, 3}));
  const auto group = adam.at("param_groups").toListRef()[0].toGenericDict();
  EXPECT_EQ(group.at("lr").toDouble(), 0.0625);  // after two steps
  EXPECT_EQ(group.at("params").toListRef().size(), 5U);
  EXPECT_EQ(training.at("schedule").toGenericDict().at("step_size").toInt(), 2);
  EXPECT_THAT([] { std::ignore = paceline::load(kFiles / "training.pt"); },
              ThrowsMessage<Error>(AllOf(
                  HasSubstr("training.pt: state_dict: not all values of the dict are tensors; it "
                            "has model, optimizer, schedule, epoch"),
                  HasSubstr("state_dict(pickle_load(path).toGenericDict().at(\"model\"))"))));
}

TEST_F(TorchFiles, AreReadAsTheyAreWritten) {
  const StateDict tensors = paceline::load(kFiles / "tensors.pt");
  paceline::save(tensors, path());
  expect_tensors(paceline::load(path()));
  const auto read = paceline::load(path());
  EXPECT_TRUE(read["base"].is_alias_of(read["part"]));
  const auto values = pickle_load(kFiles / "training.pt");
  pickle_save(values, path());
  const auto got = pickle_load(path()).toGenericDict();
  EXPECT_EQ(got.at("optimizer").toGenericDict().at("param_groups"),
            values.toGenericDict().at("optimizer").toGenericDict().at("param_groups"));
  EXPECT_EQ(got.at("schedule"), values.toGenericDict().at("schedule"));
  const std::vector<at::IValue> simple{
      {}, true, -5, 1e300, "Grüße", c10::complex<double>(1, 2), at::Device("cuda:1")};
  for (const at::IValue& value : simple) {
    pickle_save(value, path());
    EXPECT_EQ(pickle_load(path()), value);
  }
  pickle_save(c10::List<std::int64_t>({1, 2}), path());
  EXPECT_THAT(pickle_load(path()).toListRef(), ElementsAre(1, 2));
}

TEST_F(TorchFiles, CannotContainWhatPythonWouldNotRead) {
  const auto refused = [&](const at::IValue& value, const char* text) {
    EXPECT_THAT([&] { pickle_save(value, path()); }, ThrowsMessage<UsageError>(HasSubstr(text)));
    EXPECT_FALSE(fs::exists(path()));
  };
  refused(at::eye(2).to_sparse(), "not dense on cpu: only dense ones");
  refused(at::empty({2}, at::kMeta), "on meta");
  refused("\xff", "UTF-8 only");
  refused(c10::Stream(c10::Stream::DEFAULT, at::Device("cpu")), "cannot contain a Stream");
  c10::impl::GenericList list(c10::AnyType::get());
  list.push_back(list);
  refused(list, "nested deeper than 1000, or contains itself");
  list.clear();
  const at::Tensor x = at::zeros({4});
  refused(c10::ivalue::Tuple::create({x, x.view(at::kInt)}),
          "tensors of float32 and int32 that share memory");
  StateDict state;
  state.insert("x", x);
  EXPECT_THAT(
      [&] {
        paceline::save(state, path(), {.metadata = {{"a", "b"}}});
      },
      ThrowsMessage<UsageError>(HasSubstr("metadata is for safetensors files")));
  EXPECT_THAT([&] { paceline::save(state, path() / "y.pt"); },
              ThrowsMessage<Error>(HasSubstr("cannot write")));
}

TEST_F(TorchFiles, OfOtherKindsAreRefusedWithWhatToDo) {
  const auto refused = [&](const fs::path& path, const char* text) {
    EXPECT_THAT([&] { std::ignore = pickle_load(path); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr(path.string()), HasSubstr(text))));
  };
  refused(kFiles / "before_1_6.pt", "format of PyTorch before 1.6: load it in Python");
  refused(kFiles / "script.pt", "use torch::jit::load");
  refused(kFiles / "sparse.pt", "made by torch._utils._rebuild_sparse_tensor");
  write("text");
  EXPECT_THAT([&] { std::ignore = pickle_load(path()); },
              ThrowsMessage<CorruptFile>(HasSubstr("was not written by torch.save")));
  EXPECT_THAT([&] { std::ignore = pickle_load(path("none.pt")); },
              ThrowsMessage<Error>(HasSubstr("cannot read")));
}

// Small files that would make large values, or that LibTorch's reader throws other exceptions for.
TEST_F(TorchFiles, ThatAreNotWhatTheySeemAreRefused) {
  const auto refused = [&](const std::string& pickle, const std::string& version, const char* why) {
    caffe2::serialize::PyTorchStreamWriter writer(path().string());
    writer.writeRecord("data.pkl", pickle.data(), pickle.size(), /*compress=*/true);
    if (!version.empty()) writer.writeRecord("x", version.data(), version.size());
    writer.writeEndOfFile();
    EXPECT_THAT([&] { std::ignore = pickle_load(path()); }, ThrowsMessage<Error>(HasSubstr(why)));
  };
  const auto text = [](const char* data, std::size_t size) { return std::string(data, size); };
  refused(text("\x80\x02}G\x7f\xf8\0\0\0\0\0\0Ns.", 15), "", "a dict with the key NaN");
  refused("\x80\x02" + std::string(100'000'000, 'N') + ".", "", "data.pkl has 100000003 bytes, in");
  // Many sets of one list.
  std::string sets = "\x80\x02](" + std::string(1000, 'N') + "eq\x01" + "0(";
  for (int i = 0; i < 1000; ++i) sets += "cbuiltins\nset\nh\x01\x85R";
  refused(sets + "t.", "", "makes more values than it has bytes");
  // Integers whose products with the multiplier of c10's hash table are side by side: in the first
  // place of any table, and around its middle.
  std::uint64_t inverse = 1;
  for (int i = 0; i < 6; ++i) inverse *= 2 - 11400714819323198485U * inverse;
  for (const std::uint64_t begin : {std::uint64_t{0}, (std::uint64_t{1} << 63) - 12}) {
    std::string keys = "\x80\x02}(";
    for (std::uint64_t i = 0; i < 24; ++i) {
      const std::uint64_t key = (begin + i) * inverse;
      keys += "\x8a\x08" + text(reinterpret_cast<const char*>(&key), sizeof(key)) + "N";
    }
    refused(keys + "u.", "", "has dicts whose keys need too much memory");
  }
}

TEST_F(TorchFiles, MayHaveDictsOfManyKeys) {
  const auto expect_read = [&](const auto& key_of) {
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    for (std::int64_t i = 0; i < 1000; ++i) dict.insert(key_of(i), i);
    pickle_save(dict, path());
    const auto read = pickle_load(path()).toGenericDict();
    EXPECT_EQ(read.size(), 1000U);
    EXPECT_EQ(read.at(key_of(321)).toInt(), 321);
  };
  for (const int shift : {0, 1, 10, 32, 50}) {
    expect_read([&](std::int64_t i) { return i << shift; });
  }
  // Multiples of Fibonacci's numbers are side by side in the table.
  for (const int step : {100, 377, 987, 1597, 2584, 6765, 17711, 28657}) {
    expect_read([&](std::int64_t i) { return i * step; });
  }
  expect_read([](std::int64_t i) { return static_cast<double>(i) / 7; });
  expect_read([](std::int64_t i) { return "layers." + std::to_string(i) + ".weight"; });
}

TEST_F(TorchFiles, GiveTensorsOfTheMappedFile) {
  StateDict state;
  state.insert("x", at::arange(1000.0, at::kDouble));
  state.insert("part", state["x"].slice(0, 10, 20));
  paceline::save(state, path());
  const std::string content = content_of(path());
  const StateDict loaded = paceline::load(path());
  loaded["x"][15] = -1;
  EXPECT_EQ(loaded["part"][5].item<double>(), -1);
  EXPECT_EQ(content_of(path()), content);
  paceline::save(loaded, path());  // in place of the mapped file
  expect_same(paceline::load(path())["x"], loaded["x"], "x");
}

// torch.save writes no such records, but another program may rewrite a file.
TEST_F(TorchFiles, WithCompressedOrUnalignedRecordsAreRead) {
  StateDict state;
  state.insert("x", at::arange(1000.0, at::kDouble));
  paceline::save(state, path());
  for (const bool compressed : {true, false}) {
    caffe2::serialize::PyTorchStreamReader reader(path().string());
    caffe2::serialize::PyTorchStreamWriter writer(path("other.pt").string(),
                                                  /*compute_crc32=*/true, compressed ? 64 : 2);
    for (const char* const record : {"byteorder", "data.pkl", "data/0"}) {
      const auto [data, size] = reader.getRecord(record);
      writer.writeRecord(record, data.get(), size, compressed);
    }
    writer.writeEndOfFile();
    EXPECT_EQ(fs::file_size(path("other.pt")) < 8000, compressed);
    expect_same(paceline::load(path("other.pt"))["x"], state["x"], "x");
  }
}

// As a file of zeros that is made to fill the memory.
TEST_F(TorchFiles, DoNotTakeMoreMemoryThanTheySay) {
  StateDict state;
  state.insert("x", at::arange(1000.0, at::kDouble));
  paceline::save(state, path());
  for (const char* const inflated : {"byteorder", "data.pkl", "data/0"}) {
    caffe2::serialize::PyTorchStreamReader reader(path().string());
    caffe2::serialize::PyTorchStreamWriter writer(path("other.pt").string());
    for (const char* const record : {"byteorder", "data.pkl", "data/0"}) {
      auto [data, size] = reader.getRecord(record);
      std::string bytes(static_cast<const char*>(data.get()), size);
      if (std::string(record) == inflated) bytes.resize(std::size_t{64} << 20);
      writer.writeRecord(record, bytes.data(), bytes.size(), /*compress=*/true);
    }
    writer.writeEndOfFile();
    EXPECT_THAT([&] { std::ignore = paceline::load(path("other.pt")); },
                ThrowsMessage<CorruptFile>(
                    HasSubstr(std::string(inflated) + " has " + std::to_string(64 << 20))));
  }
}

// More than a ZIP archive without ZIP64 can have.
TEST_F(TorchFiles, MayHaveManyTensors) {
  StateDict state;
  for (int i = 0; i < 70'000; ++i) state.insert(std::to_string(i), at::scalar_tensor(i));
  paceline::save(state, path());
  const StateDict loaded = paceline::load(path());
  ASSERT_EQ(loaded.size(), state.size());
  EXPECT_EQ(loaded["69999"].item<float>(), 69'999);
}

TEST_F(TorchFiles, WithAnOddVersionAreRefused) {
  std::string content = content_of(kFiles / "values.pt");
  const auto at = content.rfind("version");
  ASSERT_NE(at, std::string::npos);
  const auto record = content.find("3\n");
  ASSERT_NE(record, std::string::npos);
  content[record] = 'x';
  write(content);
  EXPECT_THAT([&] { std::ignore = pickle_load(path()); },
              ThrowsMessage<CorruptFile>(HasSubstr("x.pt: ")));
}

// Its archive, its pickle and its data.
TEST_F(TorchFiles, WithAnyDamageAreReadOrRefused) {
  std::mt19937 random(1);
  for (const char* const name : {"tensors.pt", "training.pt", "module.pt"}) {
    const std::string content = content_of(kFiles / name);
    const auto any = [&](std::size_t below) {
      return std::uniform_int_distribution<std::size_t>(0, below - 1)(random);
    };
    int refused = 0;
    for (int i = 0; i < 400; ++i) {
      std::string damaged = content;
      if (i % 10 == 0) damaged.resize(any(content.size()));
      for (std::size_t change = 0; !damaged.empty() && change <= any(3); ++change) {
        damaged[any(damaged.size())] = static_cast<char>(any(256));
      }
      write(damaged);
      const auto is_refused = [&](auto read) {
        try {
          read();
        } catch (const Error& error) {
          EXPECT_THAT(error.what(), HasSubstr(path().string()));
          return 1;
        }
        return 0;
      };
      refused += is_refused([&] { std::ignore = pickle_load(path()); });
      // Its tensors are in the file.
      is_refused([&] {
        for (const auto& one : paceline::load(path())) std::ignore = one.value().clone();
      });
    }
    EXPECT_GT(refused, 40) << name;
  }
}

TEST_F(TorchFiles, OfAWrappedModelFitTheModelItself) {
  StateDict wrapped;
  for (const auto& one : paceline::load(kFiles / "state_dict.pt")) {
    wrapped.insert("module." + one.key(), one.value());
  }
  Net net;
  load_state_dict(*net, wrapped);
  expect_net(*net);
  torch::nn::Sequential outer({{"module", torch::nn::Linear(1, 1)}});
  load_state_dict(*outer, state_dict(*outer));
}

TEST_F(TorchFiles, InSeveralShardsAreOneStateDict) {
  const StateDict all = paceline::load(kFiles / "state_dict.pt");
  StateDict first;
  StateDict second;
  std::string map;
  for (const auto& one : all) {
    const bool is_first = first.size() < 4;
    (is_first ? first : second).insert(one.key(), one.value());
    map += std::string(map.empty() ? "" : ",") + "\"" + one.key() + "\":\"" +
           (is_first ? "1.safetensors" : "2.pt") + "\"";
  }
  paceline::save(first, path("1.safetensors"));
  paceline::save(second, path("2.pt"));
  const char* const index = "model.safetensors.index.json";
  write(R"({"metadata":{"total_size":1},"weight_map":{)" + map + "}}", index);
  Net net;
  paceline::load(*net, path(index));
  expect_net(*net);
  const auto refused = [&](const std::string& text, const char* why) {
    write(text, index);
    EXPECT_THAT([&] { std::ignore = paceline::load(path(index)); },
                ThrowsMessage<Error>(HasSubstr(why)));
  };
  refused("{", "is no JSON with a weight_map");
  refused(R"({"weight_map":[]})", "is no JSON with a weight_map");
  refused(R"({"weight_map":{"x":"1.safetensors"}})", "1.safetensors: has no tensor 'x'");
  refused(R"({"weight_map":{"x":"none.safetensors"}})", "none.safetensors");
  refused(R"({"weight_map":{"x":"model.safetensors.index.json"}})", "model.safetensors.index.json");
  for (const char* const shard :
       {"\"../1.safetensors\"", "\"/etc/passwd\"", "\"..\"", "\"\"", "3"}) {
    refused(std::string(R"({"weight_map":{"x":)") + shard + "}}", "which is no file beside it");
  }
}

}  // namespace
}  // namespace paceline
