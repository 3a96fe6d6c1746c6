#include "base/mapped_file.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include "base/errno_error.h"
#include "base/input_file.h"

namespace paceline::base {

MappedFile::MappedFile(const std::filesystem::path& path) {
  const InputFile file(path);
  size_ = file.size();
  if (size_ == 0) return;  // mmap refuses it
  void* const memory =
      ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.fd(), 0);
  if (memory == MAP_FAILED) throw errno_error(fmt::format("cannot map {}", path.string()));
  data_ = static_cast<char*>(memory);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace paceline::base
