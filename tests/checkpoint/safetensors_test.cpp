#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
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
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class SafetensorsFiles : public ::testing::Test {
 protected:
  fs::path path(const char* name = "net.safetensors") const { return directory_.path() / name; }
  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(directory_.path()), {}));
  }
  std::string content() const {
    std::ifstream file(path(), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  test::TemporaryDirectory directory_;
};

TEST_F(SafetensorsFiles, OfPythonAreRead) {
  const StateDict state = paceline::load(FILES_DIRECTORY "/all_types.safetensors");
  ASSERT_EQ(state.size(), kPythonsTypes.size() + 2);
  for (const auto& [name, type] : kPythonsTypes) expect_same(state[name], numbers(type), name);
  EXPECT_EQ(state["scalar"].item<float>(), 2.5);
  EXPECT_EQ(state["scalar"].dim(), 0);
  EXPECT_EQ(state["empty"].sizes(), at::IntArrayRef({0, 4}));
}

TEST_F(SafetensorsFiles, AreReadAsTheyAreWritten) {
  StateDict state;
  for (const auto& [name, type] : kPythonsTypes) state.insert(name, numbers(type));
  for (const auto type : {at::kFloat8_e8m0fnu, at::kFloat8_e5m2fnuz, at::kFloat8_e4m3fnuz}) {
    state.insert(c10::toString(type), at::arange(7).to(at::kByte).view(type));
  }
  state.insert("float4", at::arange(8).reshape({2, 4}).to(at::kByte).view(at::kFloat4_e2m1fn_x2));
  state.insert("transposed", numbers(at::kDouble).t());
  state.insert("a part", numbers(at::kFloat).slice(1, 1, 2));
  state.insert("with gradient", numbers(at::kFloat).requires_grad_());
  state.insert("scalar", at::tensor(3));
  state.insert("empty", at::empty({3, 0}));
  paceline::save(state, path());
  const StateDict got = paceline::load(path());
  ASSERT_EQ(got.size(), state.size());
  for (const auto& one : state) {
    expect_same(got[one.key()], one.value().detach().contiguous(), one.key());
  }
  EXPECT_EQ(files(), 1U);
}

TEST_F(SafetensorsFiles, HaveTheValuesOfViewsThatConjugateOrNegate) {
  const at::Tensor x = at::tensor({c10::complex<float>(1, 2)});
  StateDict state;
  state.insert("conjugate", x.conj());
  state.insert("negative", at::imag(x.conj()));
  paceline::save(state, path());
  EXPECT_EQ(paceline::load(path())["conjugate"].item<c10::complex<float>>(),
            c10::complex<float>(1, -2));
  EXPECT_EQ(paceline::load(path())["negative"].item<float>(), -2);
}

// Whose length begins with the byte of a brace.
TEST_F(SafetensorsFiles, WithAHeaderOf123BytesAreNoJson) {
  std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  header.resize(123, ' ');
  const std::uint64_t length = header.size();
  std::ofstream(path(), std::ios::binary)
      << std::string(reinterpret_cast<const char*>(&length), 8) << header << '\x07';
  EXPECT_EQ(paceline::load(path())["a"].item<int>(), 7);
}

// As the package's save_model notes it for a tensor that has two names.
TEST_F(SafetensorsFiles, HaveBothNamesOfATensor) {
  StateDict state;
  state.insert("first", at::ones({2}));
  paceline::save(state, path(), {.metadata = {{"second", "first"}, {"format", "pt"}}});
  const StateDict got = paceline::load(path());
  ASSERT_EQ(got.size(), 2U);
  EXPECT_TRUE(got["second"].is_alias_of(got["first"]));
}

TEST_F(SafetensorsFiles, HaveATensorOfSeveralNamesOnce) {
  const at::Tensor tied = at::rand({64, 64});
  StateDict state;
  state.insert("embed", tied);
  state.insert("part", tied.slice(0, 1));
  state.insert("head", tied.view({64, 64}));
  state.insert("transposed", tied.t());
  state.insert("integers", tied.view(at::kInt));
  state.insert("none", at::empty({0}));
  state.insert("nothing", at::empty({0}));
  paceline::save(state, path(), {.metadata = {{"format", "pt"}}});
  EXPECT_LT(content().size(), 5 * tied.nbytes());
  const StateDict got = paceline::load(path());
  ASSERT_EQ(got.size(), state.size());
  EXPECT_TRUE(got["head"].is_alias_of(got["embed"]));
  EXPECT_FALSE(got["transposed"].is_alias_of(got["embed"]));
  for (const auto& one : state) EXPECT_TRUE(got[one.key()].equal(one.value())) << one.key();
}

// The bytes of the format's description.
TEST_F(SafetensorsFiles, HaveThePublishedFormat) {
  StateDict state;
  state.insert("test", at::tensor({1.0F, -2.0F}));
  paceline::save(state, path(), {.metadata = {{"format", "pt"}}});
  const std::string text = content();
  ASSERT_GT(text.size(), 16U);
  std::uint64_t length = 0;
  std::memcpy(&length, text.data(), sizeof(length));
  ASSERT_EQ(text.size(), 8 + length + 8);
  std::string header = text.substr(8, length);
  header.erase(header.find_last_not_of(' ') + 1);
  EXPECT_EQ(header, R"({"__metadata__":{"format":"pt"},"test":{"dtype":"F32","shape":[2],)"
                    R"("data_offsets":[0,8]}})");
  EXPECT_EQ(text.substr(8 + length), std::string("\0\0\x80\x3f\0\0\0\xc0", 8));
}

TEST_F(SafetensorsFiles, StayAsTheyAreWhenATensorIsChanged) {
  StateDict state;
  state.insert("x", at::ones({1000}));
  paceline::save(state, path());
  paceline::load(path())["x"].fill_(7);
  EXPECT_EQ(paceline::load(path())["x"].sum().item<float>(), 1000);
  // A tensor outlives its file, too.
  const at::Tensor kept = paceline::load(path())["x"];
  state["x"].fill_(2);
  paceline::save(state, path());
  EXPECT_EQ(kept.sum().item<float>(), 1000);
  EXPECT_EQ(paceline::load(path())["x"].sum().item<float>(), 2000);
}

TEST_F(SafetensorsFiles, MayHaveTensorsThatAreNotAligned) {
  const std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})";
  const std::uint64_t length = header.size();
  std::ofstream(path(), std::ios::binary) << std::string(reinterpret_cast<const char*>(&length), 8)
                                          << header << std::string("\x07\0\0\x80\x3f", 5);
  EXPECT_EQ(paceline::load(path())["b"].item<float>(), 1);
}

TEST_F(SafetensorsFiles, ContainNothingElse) {
  const auto refuses = [&](const std::string& name, const at::Tensor& tensor, const char* why) {
    StateDict state;
    state.insert(name, tensor);
    EXPECT_THAT([&] { paceline::save(state, path()); }, ThrowsMessage<UsageError>(HasSubstr(why)));
  };
  refuses("x", at::zeros({2}, at::kComplexDouble), "tensor x is dense ComplexDouble");
  refuses("x", at::ones({2, 2}).to_sparse(), "tensor x is not dense Float");
  refuses("__metadata__", at::ones({2}), "no tensor can have the name __metadata__");
  refuses("\xff", at::ones({2}), "texts in UTF-8 only");
  EXPECT_EQ(files(), 0U);
}

TEST_F(SafetensorsFiles, AreNotReplacedByPartsOfNewOnes) {
  StateDict state;
  state.insert("x", at::ones({3}));
  paceline::save(state, path());
  state.insert("y", at::zeros({2}, at::kComplexDouble));
  EXPECT_THROW(paceline::save(state, path()), UsageError);
  EXPECT_EQ(paceline::load(path()).size(), 1U);
  EXPECT_EQ(files(), 1U);
  EXPECT_THAT([&] { paceline::save(state, path("no/such/directory")); },
              ThrowsMessage<UsageError>(::testing::_));
  EXPECT_THAT([&] { paceline::save(StateDict(), path("no/such")); },
              ThrowsMessage<Error>(HasSubstr("cannot write " + path("no/such").string())));
}

TEST_F(SafetensorsFiles, ReplaceTheFileOfALinkAndKeepItsPermissions) {
  const fs::path target = path().parent_path() / "target";
  std::ofstream(target) << "earlier";
  fs::permissions(target, fs::perms::owner_read | fs::perms::owner_write);
  fs::create_symlink("target", path());
  StateDict state;
  state.insert("t", at::ones({2}));
  paceline::save(state, path());
  EXPECT_TRUE(fs::is_symlink(path()));
  EXPECT_TRUE(torch::equal(paceline::load(target)["t"], at::ones({2})));
  EXPECT_EQ(fs::status(target).permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

// A rename would replace a device, such as /dev/null.
TEST_F(SafetensorsFiles, ReplaceNothingElse) {
  const StateDict state;
  ASSERT_EQ(::mkfifo(path().c_str(), 0600), 0);
  for (const fs::path& other : {path(), path().parent_path()}) {
    EXPECT_THAT([&] { paceline::save(state, other); },
                ThrowsMessage<Error>(AllOf(HasSubstr("cannot write " + other.string()),
                                           HasSubstr("not a regular file"))));
  }
  EXPECT_TRUE(fs::is_fifo(path()));
}

TEST_F(SafetensorsFiles, MayHaveTheLongestNames) {
  const fs::path longest = path().parent_path() / std::string(255, 'x');
  paceline::save(StateDict(), longest);
  EXPECT_TRUE(fs::is_regular_file(longest));
}

TEST_F(SafetensorsFiles, ThatCannotBeReadAreNamed) {
  EXPECT_THAT([&] { static_cast<void>(paceline::load(path())); },
              ThrowsMessage<Error>(HasSubstr("cannot read " + path().string())));
  EXPECT_THAT([&] { static_cast<void>(paceline::load(directory_.path())); },
              ThrowsMessage<Error>(HasSubstr("is not a regular file")));
  std::ofstream(path()).close();
  EXPECT_THAT([&] { static_cast<void>(paceline::load(path())); },
              ThrowsMessage<CorruptFile>(HasSubstr(path().string() + ": not a safetensors file")));
}

}  // namespace
}  // namespace paceline
