#include "checkpoint/pickled_tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.h>

namespace paceline::checkpoint {
namespace {

using ::testing::HasSubstr;
using Kind = PickleValue::Kind;

constexpr auto kMost = std::numeric_limits<std::int64_t>::max();

PickledTensor two_by_three(const std::string& dtype = "float32") {
  return {.dtype = dtype,
          .storage = "7",
          .storage_size = 10,
          .location = "cpu",
          .offset = 4,
          .sizes = {2, 3},
          .strides = {3, 1}};
}

// Adds a tensor, changes its arguments, and reads it.
std::string problem(const std::function<void(Pickle&, std::vector<const PickleValue*>&)>& change,
                    const PickledTensor& tensor = two_by_three()) {
  Pickle pickle;
  PickleValue value = add_tensor(pickle, tensor);
  std::vector<const PickleValue*> arguments = value.arguments->elements;
  change(pickle, arguments);
  value.arguments = &pickle.add_sequence(Kind::tuple, arguments);
  try {
    tensor_of(value, "x.pt");
  } catch (const CorruptFile& error) {
    return std::string("corrupt: ") + error.what();
  } catch (const UsageError& error) {
    return std::string("unsupported: ") + error.what();
  }
  return "none";
}

std::string problem(const PickledTensor& tensor) {
  return problem([](Pickle& /*pickle*/, auto& /*arguments*/) {}, tensor);
}

TEST(PickledTensors, AreReadAsTheyAreWritten) {
  for (const char* const dtype : {"float32", "bool", "complex128", "uint16", "float8_e5m2"}) {
    PickledTensor tensor = two_by_three(dtype);
    tensor.requires_grad = true;
    Pickle pickle;
    const auto got = tensor_of(add_tensor(pickle, tensor), "x.pt");
    ASSERT_TRUE(got.has_value());
    EXPECT_EQ(got->dtype, dtype);
    EXPECT_EQ(got->storage, "7");
    EXPECT_EQ(got->storage_size, 10U);
    EXPECT_EQ(got->location, "cpu");
    EXPECT_EQ(got->offset, 4);
    EXPECT_EQ(got->sizes, tensor.sizes);
    EXPECT_EQ(got->strides, tensor.strides);
    EXPECT_TRUE(got->requires_grad);
  }
}

TEST(PickledTensors, OtherValuesAreNone) {
  Pickle pickle;
  EXPECT_FALSE(tensor_of(pickle.add_integer(1), "x.pt"));
  EXPECT_FALSE(tensor_of(pickle.add_call(pickle.add_text(Kind::global, "net.Model"), {}), "x.pt"));
}

TEST(PickledTensors, AreWithinTheirStorage) {
  const std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>> outside{
      {{2, 4}, {3, 1}}, {{3, 3}, {3, 1}},         {{2, 3}, {4, 1}},         {{2, 2}, {kMost, 1}},
      {{kMost}, {1}},   {{kMost, kMost}, {0, 0}}, {{3, 3}, {kMost, kMost}},
  };
  for (const auto& [sizes, strides] : outside) {
    PickledTensor tensor = two_by_three();
    tensor.sizes = sizes;
    tensor.strides = strides;
    EXPECT_THAT(problem(tensor), HasSubstr("corrupt: x.pt: a tensor has"));
  }
  PickledTensor tensor = two_by_three();
  tensor.offset = 5;
  EXPECT_THAT(problem(tensor), HasSubstr("elements outside of its storage"));
  tensor.offset = -1;
  EXPECT_THAT(problem(tensor), HasSubstr("corrupt"));
  tensor = two_by_three();
  tensor.sizes = {2, -3};
  EXPECT_THAT(problem(tensor), HasSubstr("a negative size or stride"));
  tensor.sizes = {2};
  EXPECT_THAT(problem(tensor), HasSubstr("sizes and strides that do not fit together"));
  // Without elements, and with the same one many times.
  tensor.sizes = {0, 100};
  EXPECT_EQ(problem(tensor), "none");
  tensor.sizes = {100, 100};
  tensor.strides = {0, 0};
  EXPECT_EQ(problem(tensor), "none");
}

TEST(PickledTensors, AreRefusedWithOtherArguments) {
  EXPECT_THAT(problem([](Pickle&, auto& arguments) { arguments.pop_back(); }),
              HasSubstr("too few arguments"));
  for (const std::size_t i : {0, 1, 2, 3, 4}) {
    EXPECT_THAT(problem([i](Pickle& pickle, auto& arguments) { arguments[i] = &pickle.add({}); }),
                HasSubstr("corrupt: x.pt: a tensor has no "))
        << i;
  }
  const auto with_storage = [](const std::string& type) {
    return [type](Pickle& pickle, auto& arguments) {
      PickleValue id = *arguments[0]->elements[0];
      id.elements[1] = &pickle.add_text(Kind::global, type);
      arguments[0] = &pickle.add_sequence(Kind::persistent, {&pickle.add(std::move(id))});
    };
  };
  EXPECT_THAT(problem(with_storage("torch.storage.UntypedStorage")), HasSubstr("no dtype"));
  EXPECT_THAT(problem(with_storage("torch.QInt8Storage")),
              HasSubstr("unsupported: x.pt: a tensor is in a torch.QInt8Storage"));
  EXPECT_THAT(problem(with_storage("torch.FloatStorage"), two_by_three("uint16")),
              HasSubstr("a dtype and a storage of another"));
  const auto with_dtype = [](Pickle& pickle, auto& arguments) {
    arguments[6] = &pickle.add_text(Kind::global, "torch.bits8");
  };
  EXPECT_THAT(problem(with_dtype, two_by_three("uint16")),
              HasSubstr("unsupported: x.pt: a tensor has the dtype torch.bits8"));
}

TEST(PickledTensors, OfOtherKindsAreRefusedByName) {
  Pickle pickle;
  const auto& sparse =
      pickle.add_call(pickle.add_text(Kind::global, "torch._utils._rebuild_sparse_tensor"), {});
  EXPECT_THAT(
      [&] { tensor_of(sparse, "x.pt"); },
      ::testing::ThrowsMessage<UsageError>(HasSubstr(
          "a tensor is made by torch._utils._rebuild_sparse_tensor; Paceline reads dense")));
}

}  // namespace
}  // namespace paceline::checkpoint
