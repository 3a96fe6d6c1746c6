#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <string>

#include <paceline/distributed.h>

#include "base/unique_fd.h"
#include "support/temporary_directory.h"

namespace paceline::test {

constexpr std::chrono::seconds kTimeout{1};
// Far more than it takes, for machines that have other things to do.
constexpr std::chrono::seconds kLate{30};

// What a rank throws that cannot join, which it must find out in time.
std::string failure_to_join(InitOptions options);

// The same in a process of its own, whose environment may be changed.
std::string failure_alone(const InitOptions& options,
                          const std::map<std::string, std::string>& environment = {});

// Bound to a free port of the loopback; listens only once listen() is called.
class Port {
 public:
  Port();
  void listen() const;
  std::string number() const { return std::to_string(number_); }
  std::string method() const { return "tcp://127.0.0.1:" + number(); }

 private:
  base::UniqueFd socket_;
  int number_ = 0;
};

// Sets this process's environment.
void set_variables(const std::map<std::string, std::string>& variables);

class Rendezvous : public ::testing::Test {
 protected:
  std::string path() const { return directory_.path() / "store"; }
  std::string method() const { return "file://" + path(); }

 private:
  const TemporaryDirectory directory_;
};

}  // namespace paceline::test
