#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace paceline::distributed {

// A store in a file that its processes share, such as a memfd, which may be empty at first. Unlike
// c10d::FileStore it outlives processes that are killed at any moment: a record counts once the
// file's header says that it is complete.
//
// Thread-safe. Each call holds the file's lock (flock) for its own time, and waits for a process
// that is stopped while it does.
class MemoryStore final : public c10d::Store {
 public:
  // The file at a path such as /proc/self/fd/4, which errors call `name`. Throws Error if it cannot
  // be used, and UsageError if it holds something else.
  MemoryStore(const std::string& path, std::string name);

  c10::intrusive_ptr<c10d::Store> clone() override;
  using Store::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  using Store::compareSet;
  std::vector<std::uint8_t> compareSet(const std::string& key,
                                       const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  class Locked;

  const std::string name_;
  base::UniqueFd file_;
  std::mutex mutex_;  // guards what follows: what was read of the file
  std::uint64_t read_ = 0;
  std::map<std::string, std::vector<std::uint8_t>> values_;
};

}  // namespace paceline::distributed
