#include <fmt/format.h>
#include <fmt/ranges.h>

#include <paceline/error.h>
#include <paceline/images.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <system_error>

#include "data/check_index.h"

namespace paceline::data {
namespace {

namespace fs = std::filesystem;

constexpr std::array<std::string_view, 3> kRead = {".png", ".jpg", ".jpeg"};
// Also images for torchvision: to leave them out silently would train with fewer samples.
constexpr std::array<std::string_view, 6> kNotRead = {".ppm", ".bmp",  ".pgm",
                                                      ".tif", ".tiff", ".webp"};

template <std::size_t N>
bool ends_with_any(std::string name, const std::array<std::string_view, N>& suffixes) {
  std::ranges::transform(name, name.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return std::ranges::any_of(suffixes,
                             [&](std::string_view suffix) { return name.ends_with(suffix); });
}

std::vector<std::string> find_classes(const fs::path& root) {
  std::vector<std::string> classes;
  for (const auto& entry : fs::directory_iterator(root)) {
    if (entry.is_directory()) classes.push_back(entry.path().filename().string());
  }
  std::ranges::sort(classes);
  if (classes.empty()) {
    throw Error(
        fmt::format("ImageFolder: {} has no directories; each class needs one with its "
                    "images",
                    root.string()));
  }
  return classes;
}

// The images below `folder`. Directories are sorted as strings, as torchvision sorts them: "a",
// "a.b", "a/b".
std::vector<fs::path> find_images(const fs::path& folder) {
  std::vector<std::pair<std::string, std::string>> found;  // directory and name
  constexpr auto kOptions = fs::directory_options::follow_directory_symlink;
  for (const auto& entry : fs::recursive_directory_iterator(folder, kOptions)) {
    const std::string name = entry.path().filename().string();
    const bool readable = ends_with_any(name, kRead);
    if (!readable && !ends_with_any(name, kNotRead)) continue;
    if (entry.is_directory()) continue;
    if (!readable) {
      throw UsageError(
          fmt::format("ImageFolder: {} is neither a PNG nor a JPEG file; convert it "
                      "or move it away",
                      entry.path().string()));
    }
    found.emplace_back(entry.path().parent_path().string(), name);
  }
  std::ranges::sort(found);
  std::vector<fs::path> paths;
  paths.reserve(found.size());
  for (const auto& [directory, name] : found) paths.push_back(fs::path(directory) / name);
  return paths;
}

std::vector<ImageFolder::File> find_files(const fs::path& root,
                                          const std::vector<std::string>& classes,
                                          bool allow_empty) {
  std::vector<ImageFolder::File> files;
  for (std::size_t i = 0; i < classes.size(); ++i) {
    std::vector<fs::path> images = find_images(root / classes[i]);
    if (images.empty() && !allow_empty) {
      throw Error(
          fmt::format("ImageFolder: the class {} has no images: no file below {} ends in "
                      "{}; set allow_empty if that may be",
                      classes[i], (root / classes[i]).string(), fmt::join(kRead, ", ")));
    }
    for (fs::path& image : images) {
      files.emplace_back(std::move(image), static_cast<std::int64_t>(i));
    }
  }
  return files;
}

}  // namespace

ImageFolder::ImageFolder(const fs::path& root, const ImageFolderOptions& options)
    : mode_(options.mode) {
  try {
    classes_ = std::make_shared<const std::vector<std::string>>(find_classes(root));
    files_ =
        std::make_shared<const std::vector<File>>(find_files(root, *classes_, options.allow_empty));
  } catch (const fs::filesystem_error& error) {
    throw Error(fmt::format(
        "ImageFolder: cannot read {}: {}",
        error.path1().empty() ? "a folder below " + root.string() : error.path1().string(),
        error.code().message()));
  }
}

ImageFolder::Sample ImageFolder::get(std::int64_t index) const {
  check_index("ImageFolder", index, size());
  const auto& [path, label] = (*files_)[static_cast<std::size_t>(index)];
  return {read_image(path, mode_).to(at::kFloat).div_(255), label};
}

std::map<std::string, std::int64_t> ImageFolder::class_to_idx() const {
  std::map<std::string, std::int64_t> numbers;
  for (const std::string& name : *classes_) {
    numbers.emplace(name, static_cast<std::int64_t>(numbers.size()));
  }
  return numbers;
}

}  // namespace paceline::data
