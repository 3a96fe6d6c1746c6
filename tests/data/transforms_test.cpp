#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <paceline/error.h>
#include <paceline/transforms.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace paceline::data::transforms {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// The image of transforms_expected.py.
at::Tensor image(std::int64_t channels, std::int64_t height, std::int64_t width,
                 at::ScalarType type = at::kFloat) {
  const at::Tensor values = at::arange(channels * height * width, at::kLong)
                                .mul(37)
                                .remainder(256)
                                .view({channels, height, width});
  return type == at::kByte ? values.to(type) : values.to(type).div(255);
}

at::Generator generator_of(std::uint64_t seed) {
  return at::detail::createCPUGenerator(seed);
}

// Shapes and values by the names in transforms_expected.py.
const std::map<std::string, std::pair<std::vector<std::int64_t>, std::vector<float>>> kExpected = {
#include "transforms_expected.inc"
};

void expect_result(const std::string& name, const at::Tensor& result) {
  SCOPED_TRACE(name);
  const auto& [shape, values] = kExpected.at(name);
  ASSERT_EQ(result.sizes(), at::IntArrayRef(shape));
  const double tolerance = result.scalar_type() == at::kByte ? 0 : 1e-6;
  EXPECT_TRUE(result.to(at::kFloat).allclose(at::tensor(values).view(shape), 0, tolerance))
      << result;
}

// The rectangle, row by row, with 0 outside of the image.
at::Tensor cut(const at::Tensor& from, std::int64_t top, std::int64_t left, std::int64_t height,
               std::int64_t width) {
  at::Tensor part = at::zeros({from.size(0), height, width}, from.options());
  for (std::int64_t y = 0; y < height; ++y) {
    for (std::int64_t x = 0; x < width; ++x) {
      const std::int64_t from_y = y + top;
      const std::int64_t from_x = x + left;
      if (from_y < 0 || from_x < 0 || from_y >= from.size(1) || from_x >= from.size(2)) continue;
      part.select(1, y).select(1, x).copy_(from.select(1, from_y).select(1, from_x));
    }
  }
  return part;
}

TEST(Flips, MirrorTheSides) {
  const at::Tensor pixels = at::tensor({1, 2, 3, 4, 5, 6}, at::kByte).view({1, 2, 3});
  EXPECT_TRUE(hflip(pixels).equal(at::tensor({3, 2, 1, 6, 5, 4}, at::kByte).view({1, 2, 3})));
  EXPECT_TRUE(vflip(pixels).equal(at::tensor({4, 5, 6, 1, 2, 3}, at::kByte).view({1, 2, 3})));
}

TEST(Crop, IsZeroOutsideOfTheImage) {
  for (const auto type : {at::kFloat, at::kByte}) {
    const at::Tensor pixels = image(2, 5, 6, type);
    EXPECT_TRUE(crop(pixels, 1, 2, 3, 4).equal(cut(pixels, 1, 2, 3, 4)));
    EXPECT_TRUE(crop(pixels, -1, -2, 9, 10).equal(cut(pixels, -1, -2, 9, 10)));
    EXPECT_TRUE(crop(pixels, 3, 4, 4, 5).equal(cut(pixels, 3, 4, 4, 5)));
    EXPECT_TRUE(crop(pixels, 8, 9, 2, 3).equal(cut(pixels, 8, 9, 2, 3)));
    EXPECT_TRUE(crop(pixels, -8, -9, 2, 3).equal(cut(pixels, -8, -9, 2, 3)));
  }
}

// torchvision rounds half of what is cut off to even, and pads the top and left less.
TEST(CenterCrop, IsTheMiddle) {
  const at::Tensor pixels = image(1, 7, 8);
  EXPECT_TRUE(center_crop(pixels, 4).equal(cut(pixels, 2, 2, 4, 4)));       // 1.5 to 2
  EXPECT_TRUE(center_crop(pixels, {6, 3}).equal(cut(pixels, 0, 2, 6, 3)));  // 0.5 to 0, 2.5 to 2
  EXPECT_TRUE(center_crop(pixels, {7, 8}).equal(pixels));
  EXPECT_TRUE(center_crop(pixels, {10, 11}).equal(cut(pixels, -1, -1, 10, 11)));
  EXPECT_TRUE(center_crop(pixels, {10, 4}).equal(cut(pixels, -1, 2, 10, 4)));
}

TEST(Pad, TakesOneTwoOrFourNumbers) {
  const at::Tensor pixels = image(2, 3, 4, at::kByte);
  EXPECT_TRUE(transforms::pad(pixels, 2).equal(cut(pixels, -2, -2, 7, 8)));
  EXPECT_TRUE(transforms::pad(pixels, {1, 2}).equal(cut(pixels, -2, -1, 7, 6)));
  EXPECT_TRUE(transforms::pad(pixels, {1, 2, 3, 4}).equal(cut(pixels, -2, -1, 9, 8)));
  EXPECT_TRUE(transforms::pad(pixels, {}).equal(pixels));
}

TEST(Pad, FillsWithAValueOrPixels) {
  const at::Tensor row = at::tensor({1, 2, 3}, at::kByte).view({1, 1, 3});
  const auto padded = [&](PaddingMode mode) {
    return transforms::pad(row, {2, 0}, 9, mode).view({7});
  };
  EXPECT_TRUE(padded(PaddingMode::constant).equal(at::tensor({9, 9, 1, 2, 3, 9, 9}, at::kByte)));
  EXPECT_TRUE(padded(PaddingMode::edge).equal(at::tensor({1, 1, 1, 2, 3, 3, 3}, at::kByte)));
  EXPECT_TRUE(padded(PaddingMode::reflect).equal(at::tensor({3, 2, 1, 2, 3, 2, 1}, at::kByte)));
}

TEST(Resize, IsThatOfPyTorch) {
  for (const auto& [type, name] : {std::pair(at::kFloat, "float"), std::pair(at::kByte, "byte")}) {
    const std::string prefix = std::string("resize ") + name;
    const at::Tensor pixels = image(3, 7, 9, type);
    expect_result(prefix + " smaller", transforms::resize(pixels, {4, 5}));
    expect_result(prefix + " larger", transforms::resize(image(1, 3, 4, type), {5, 7}));
    expect_result(prefix + " shorter side", transforms::resize(image(1, 7, 9, type), 3));
    expect_result(prefix + " aliased", transforms::resize(pixels, {4, 5}, /*antialias=*/false));
  }
}

TEST(Resize, KeepsTheRatioForOneNumber) {
  EXPECT_EQ(transforms::resize(image(1, 9, 7), 3).sizes(),
            at::IntArrayRef({1, 3, 3}));  // 3.86 down
  EXPECT_EQ(transforms::resize(image(1, 20, 10), 5).sizes(), at::IntArrayRef({1, 10, 5}));
  EXPECT_EQ(transforms::resize(image(1, 10, 20), 5).sizes(), at::IntArrayRef({1, 5, 10}));
}

// Also without channels, and with several dimensions before them.
TEST(Transforms, TakeAnyDimensionsInFront) {
  const at::Tensor pixels = image(2, 6, 5);
  const at::Tensor batch = at::stack({pixels, pixels + 1, pixels * 2}).view({3, 1, 2, 6, 5});
  const at::Tensor smaller = transforms::resize(batch, {3, 2});
  ASSERT_EQ(smaller.sizes(), at::IntArrayRef({3, 1, 2, 3, 2}));
  EXPECT_TRUE(smaller[2][0].allclose(transforms::resize(pixels * 2, {3, 2})));
  EXPECT_TRUE(
      transforms::resize(pixels[1], {3, 2}).allclose(transforms::resize(pixels, {3, 2})[1]));
  EXPECT_TRUE(crop(pixels[1], 1, 1, 2, 3).equal(crop(pixels, 1, 1, 2, 3)[1]));
  EXPECT_TRUE(transforms::pad(pixels[1], 2, 0, PaddingMode::reflect)
                  .equal(transforms::pad(pixels, 2, 0, PaddingMode::reflect)[1]));
}

TEST(Normalize, SubtractsTheMeanAndDividesByStd) {
  const at::Tensor pixels = image(2, 1, 2);  // 0, 37, 74, 111
  const at::Tensor result = normalize(pixels, {0.5, 0.25}, {0.5, 0.2});
  const std::vector<double> expected = {(0 - 0.5) / 0.5, (37 / 255.0 - 0.5) / 0.5,
                                        (74 / 255.0 - 0.25) / 0.2, (111 / 255.0 - 0.25) / 0.2};
  EXPECT_TRUE(result.view({4}).to(at::kDouble).allclose(at::tensor(expected), 0, 1e-6));
  EXPECT_TRUE(normalize(pixels, 0.5, 0.25).allclose((pixels - 0.5) * 4));
  EXPECT_TRUE(pixels.equal(image(2, 1, 2)));
}

TEST(ToFloat, ScalesByTheGreatestValue) {
  // 3 times 1/255 as float32, which torchvision calculates, is not 3/255.
  EXPECT_TRUE(
      to_float(at::tensor({0, 3, 255}, at::kByte)).equal(at::tensor({0.0F, 0x1.818184p-7F, 1.0F})));
  EXPECT_TRUE(to_float(at::tensor({-32767, 32767}, at::kShort)).equal(at::tensor({-1.0F, 1.0F})));
  EXPECT_TRUE(to_float(at::tensor({0.5, 3.0}, at::kDouble)).equal(at::tensor({0.5F, 3.0F})));
}

TEST(Colours, AreAdjustedAsByTorchvision) {
  for (const auto& [type, name] : {std::pair(at::kFloat, "float"), std::pair(at::kByte, "byte")}) {
    const at::Tensor pixels = image(3, 7, 9, type);
    expect_result(std::string("brightness ") + name, adjust_brightness(pixels, 1.3));
    expect_result(std::string("contrast ") + name, adjust_contrast(pixels, 0.4));
    expect_result(std::string("saturation ") + name, adjust_saturation(pixels, 1.7));
  }
  expect_result("saturation rounded down", adjust_saturation(image(3, 8, 8, at::kByte), 0.1));
  const at::Tensor grey = image(1, 3, 3);
  EXPECT_TRUE(adjust_saturation(grey, 2).equal(grey));
  EXPECT_TRUE(adjust_contrast(grey, 0).allclose(grey.mean().expand({1, 3, 3})));
}

class RandomTransforms : public ::testing::TestWithParam<int> {
 protected:
  void expect(const std::string& name, const at::Tensor& result) {
    expect_result(name + " " + std::to_string(GetParam()), result);
  }
  at::Generator generator_ = generator_of(static_cast<std::uint64_t>(GetParam()));
};

// One generator for all, so that each takes as many numbers as in Python.
TEST_P(RandomTransforms, DrawWhatTorchvisionDraws) {
  expect("random_crop", random_crop(image(1, 6, 6), 6, 2, generator_));
  expect("random_crop again",
         random_crop(image(1, 6, 6), 6, 2, generator_, 0, PaddingMode::reflect));
  expect("random_crop of one side", random_crop(image(1, 7, 4), 4, {}, generator_));
  std::vector<float> flips;
  const at::Tensor row = at::tensor({0.0F, 1.0F}).view({1, 2});
  for (int i = 0; i < 20; ++i) {
    flips.push_back(random_horizontal_flip(row, 0.3, generator_)[0][0].item<float>());
  }
  expect("flips", at::tensor(flips));
  const at::Tensor pixels = image(1, 11, 8);
  const auto prefix = "random_resized_crop " + std::to_string(GetParam());
  expect_result(prefix + " 0", random_resized_crop(pixels, 4, generator_));
  expect_result(prefix + " 1", random_resized_crop(pixels, {4, 4}, generator_));
  const RandomResizedCropOptions whole{.scale = {1, 1}, .ratio = {0.5, 2}};
  expect("random_resized_crop wide", random_resized_crop(image(1, 3, 11), 4, generator_, whole));
  expect("random_resized_crop tall", random_resized_crop(image(1, 11, 3), 4, generator_, whole));
  const ColorJitterOptions jitter{.brightness = 0.4, .contrast = 0.5, .saturation = 1.6};
  expect("color_jitter float", color_jitter(image(3, 3, 4), jitter, generator_));
  expect("color_jitter byte", color_jitter(image(3, 3, 4, at::kByte), jitter, generator_));
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomTransforms, ::testing::Range(0, 3));

template <typename Function>
void expect_usage_error(const std::string& reason, Function function) {
  EXPECT_THAT([&] { static_cast<void>(function()); }, ThrowsMessage<UsageError>(HasSubstr(reason)));
}

TEST(Transforms, RejectWhatDoesNotFit) {
  const at::Tensor pixels = image(3, 4, 5);
  auto generator = generator_of(0);
  expect_usage_error("hflip: the tensor has shape {3}", [] { return hflip(at::zeros({3})); });
  expect_usage_error("resize: the tensor has shape {}",
                     [] { return transforms::resize(at::Tensor(), 3); });
  expect_usage_error("vflip: the tensor has shape {3, 0, 2}", [] {
    return vflip(at::zeros({3, 0, 2}));
  });
  expect_usage_error("the size is {0, 4}", [&] { return transforms::resize(pixels, {0, 4}); });
  expect_usage_error("the size is {1, 2, 3}", [&] { return center_crop(pixels, {1, 2, 3}); });
  expect_usage_error("crop: the size is {-1, 2}", [&] { return crop(pixels, 0, 0, -1, 2); });
  expect_usage_error("the padding is {1, 2, 3}", [&] {
    return transforms::pad(pixels, {1, 2, 3});
  });
  expect_usage_error("the padding is {-1}", [&] { return transforms::pad(pixels, -1); });
  expect_usage_error("smaller than the image", [&] {
    return transforms::pad(pixels, {0, 4}, 0, PaddingMode::reflect);
  });
  expect_usage_error("call to_float first",
                     [&] { return normalize(image(3, 4, 5, at::kByte), 0.5, 0.5); });
  expect_usage_error("std has a 0", [&] { return normalize(pixels, 0.5, 0.0); });
  expect_usage_error("mean has 2 numbers", [&] { return normalize(pixels, {0.5, 0.5}, 0.5); });
  expect_usage_error("Long has no scale", [] { return to_float(at::zeros({2, 2}, at::kLong)); });
  expect_usage_error("got 2 channels", [] { return adjust_contrast(at::zeros({2, 4, 4}), 1); });
  expect_usage_error("the factor -1", [&] { return adjust_brightness(pixels, -1); });
  expect_usage_error("6 x 7 pixels, fewer than the crop, 7 x 7",
                     [&] { return random_crop(pixels, 7, 1, generator); });
  expect_usage_error("p is 1.5", [&] { return random_horizontal_flip(pixels, 1.5, generator); });
  expect_usage_error("scale is {0, 1}", [&] {
    return random_resized_crop(pixels, 2, generator, {.scale = {0, 1}});
  });
  expect_usage_error("ratio is {2, 1}", [&] {
    return random_resized_crop(pixels, 2, generator, {.ratio = {2, 1}});
  });
  expect_usage_error("contrast is -0.5",
                     [&] { return color_jitter(pixels, {.contrast = -0.5}, generator); });
}

}  // namespace
}  // namespace paceline::data::transforms
