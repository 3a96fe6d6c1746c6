#include "distributed/rendezvous/memory_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <torch/csrc/distributed/c10d/exception.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include <paceline/error.h>

#include "base/deadline.h"
#include "base/errno_error.h"
#include "distributed/store_calls.h"

namespace paceline::distributed {
namespace {

using Value = std::vector<std::uint8_t>;

// At the beginning of the file. What follows `size` is of a process that was killed.
struct Header {
  std::array<char, 8> magic;
  std::uint64_t size;  // of the file, as far as it is complete
};
constexpr std::array<char, 8> kMagic{'p', 'c', 'l', 's', 't', 'o', 'r', '1'};

// Before each key and its value.
struct Record {
  std::uint32_t key_size;
  std::uint32_t value_size;  // kDeleted: the key has none any more
};
constexpr std::uint32_t kDeleted = ~0U;

template <typename Words>
std::string_view bytes_of(const Words& words) {
  return {reinterpret_cast<const char*>(&words), sizeof(words)};
}

}  // namespace

// The store with the file locked and read up to its end.
class MemoryStore::Locked {
 public:
  explicit Locked(MemoryStore& store)
      : store_(store), lock_(store.mutex_), file_(store.file_.get()) {
    while (::flock(file_, LOCK_EX) != 0) {
      if (errno != EINTR) throw base::errno_error("cannot lock " + store_.name_);
    }
    try {
      read_on();
    } catch (...) {
      ::flock(file_, LOCK_UN);
      throw;
    }
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  ~Locked() { ::flock(file_, LOCK_UN); }

  const Value* find(const std::string& key) const {
    const auto found = store_.values_.find(key);
    return found == store_.values_.end() ? nullptr : &found->second;
  }

  void set(const std::string& key, const Value& value) {
    append(key, static_cast<std::uint32_t>(value.size()),
           {reinterpret_cast<const char*>(value.data()), value.size()});
    store_.values_[key] = value;
  }
  void erase(const std::string& key) {
    append(key, kDeleted, "");
    store_.values_.erase(key);
  }

 private:
  void read_on() {
    struct stat status {};
    if (::fstat(file_, &status) != 0) throw base::errno_error("cannot read " + store_.name_);
    const auto file_size = static_cast<std::uint64_t>(status.st_size);
    Header header{kMagic, sizeof(Header)};
    if (file_size > 0) {
      const std::string text = read(0, std::min(file_size, sizeof(header)));
      std::memcpy(&header, text.data(), text.size());
    }
    if (!S_ISREG(status.st_mode) || header.magic != kMagic) {
      throw UsageError(store_.name_ + " holds something else than the ranks' store");
    }
    if (store_.read_ == 0) store_.read_ = sizeof(header);
    if (header.size < store_.read_ || header.size > std::max(file_size, sizeof(header))) {
      throw damaged();
    }
    const std::string records = read(store_.read_, header.size - store_.read_);
    std::size_t at = 0;
    while (at < records.size()) at += take(std::string_view(records).substr(at));
    store_.read_ = header.size;
  }

  // The first record of `text`. Returns its size.
  std::size_t take(std::string_view text) {
    Record record{};
    if (text.size() < sizeof(record)) throw damaged();
    std::memcpy(&record, text.data(), sizeof(record));
    text.remove_prefix(sizeof(record));
    const std::size_t value_size = record.value_size == kDeleted ? 0 : record.value_size;
    if (text.size() < record.key_size + value_size) throw damaged();
    const std::string key(text.substr(0, record.key_size));
    const std::string_view value = text.substr(record.key_size, value_size);
    if (record.value_size == kDeleted) {
      store_.values_.erase(key);
    } else {
      store_.values_[key] = Value(value.begin(), value.end());
    }
    return sizeof(record) + record.key_size + value_size;
  }

  void append(const std::string& key, std::uint32_t value_size, std::string_view value) {
    const Record record{static_cast<std::uint32_t>(key.size()), value_size};
    std::string text(bytes_of(record));
    text += key;
    text += value;
    write(text, store_.read_);
    const Header header{kMagic, store_.read_ + text.size()};
    write(bytes_of(header), 0);
    store_.read_ = header.size;
  }

  // The kernel writes a header at once: a process is killed before or after.
  void write(std::string_view bytes, std::uint64_t offset) const {
    while (!bytes.empty()) {
      const ssize_t size = ::pwrite(file_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
      if (size < 0 && errno != EINTR) throw base::errno_error("cannot write to " + store_.name_);
      if (size < 0) continue;
      bytes.remove_prefix(static_cast<std::size_t>(size));
      offset += static_cast<std::uint64_t>(size);
    }
  }

  // So many bytes, which the file has.
  std::string read(std::uint64_t offset, std::size_t size) const {
    std::string bytes(size, '\0');
    for (std::size_t got = 0; got < size;) {
      const ssize_t more =
          ::pread(file_, bytes.data() + got, size - got, static_cast<off_t>(offset + got));
      if (more < 0 && errno == EINTR) continue;
      if (more < 0) throw base::errno_error("cannot read " + store_.name_);
      if (more == 0) throw damaged();
      got += static_cast<std::size_t>(more);
    }
    return bytes;
  }

  Error damaged() const { return Error(store_.name_ + " is damaged"); }

  MemoryStore& store_;
  const std::lock_guard<std::mutex> lock_;
  const int file_;
};

// Opened anew: processes that inherit a descriptor have one lock in common.
MemoryStore::MemoryStore(const std::string& path, std::string name)
    : name_(std::move(name)), file_(::open(path.c_str(), O_RDWR | O_CLOEXEC)) {
  if (!file_) throw base::errno_error(fmt::format("cannot use {} for the rendezvous", name_));
  const Locked locked(*this);
}

c10::intrusive_ptr<c10d::Store> MemoryStore::clone() {
  return c10::make_intrusive<MemoryStore>(fmt::format("/proc/self/fd/{}", file_.get()), name_);
}

void MemoryStore::set(const std::string& key, const Value& value) {
  Locked(*this).set(key, value);
}

Value MemoryStore::compareSet(const std::string& key, const Value& expected, const Value& desired) {
  Locked locked(*this);
  const Value* const value = locked.find(key);
  if (value == nullptr && !expected.empty()) return expected;
  if (value != nullptr && *value != expected) return *value;
  locked.set(key, desired);
  return desired;
}

Value MemoryStore::get(const std::string& key) {
  wait({key});
  const Locked locked(*this);
  const Value* const value = locked.find(key);
  if (value == nullptr) throw Error(fmt::format("'{}' was deleted from {}", key, name_));
  return *value;
}

std::int64_t MemoryStore::add(const std::string& key, std::int64_t value) {
  Locked locked(*this);
  if (const Value* const before = locked.find(key)) {
    value += std::stoll(std::string(before->begin(), before->end()));
  }
  const std::string text = std::to_string(value);
  locked.set(key, {text.begin(), text.end()});
  return value;
}

bool MemoryStore::deleteKey(const std::string& key) {
  Locked locked(*this);
  if (locked.find(key) == nullptr) return false;
  locked.erase(key);
  return true;
}

bool MemoryStore::check(const std::vector<std::string>& keys) {
  const Locked locked(*this);
  return std::ranges::all_of(keys, [&](const auto& key) { return locked.find(key) != nullptr; });
}

std::int64_t MemoryStore::getNumKeys() {
  const Locked locked(*this);
  return static_cast<std::int64_t>(values_.size());
}

void MemoryStore::wait(const std::vector<std::string>& keys,
                       const std::chrono::milliseconds& timeout) {
  const auto deadline =
      base::Deadline::after(timeout == kNoTimeout ? base::Deadline::kLongest : timeout);
  await_keys(*this, keys, [&] { return deadline.expired(); });
  if (check(keys)) return;
  C10_THROW_ERROR(
      DistStoreError,
      fmt::format("{} did not get {} within {} ms", name_,
                  keys.size() == 1 ? "'" + keys.front() + "'" : fmt::format("{} keys", keys.size()),
                  timeout.count()));
}

}  // namespace paceline::distributed
