#include "shm/membership/cross_memory_reader.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "support/refuse_call.h"

namespace paceline::shm {
namespace {

constexpr int kReader = 0;
constexpr int kOther = 1;

// A process that waits until it is killed.
class Child {
 public:
  Child() : pid_(::fork()) {
    if (pid_ == 0) ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (pid_ == 0) ::pause();
  }
  ~Child() { end(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  pid_t pid() const { return pid_; }
  void end() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_;
};

// Two ranks of this process, the second one in the process that the first takes it for.
class CrossMemory : public ::testing::Test {
 protected:
  bool read(pid_t process, const std::vector<int>& data) {
    return read(process, reinterpret_cast<std::uintptr_t>(data.data()), data.size());
  }
  bool read(pid_t process, std::uint64_t address, std::size_t count) {
    const auto membership = std::make_shared<Membership>();
    membership->peers.resize(2);
    membership->peers[kOther].pid = process;
    const CrossMemoryReader reader(memory_, membership, kReader);
    target_.assign(count, -1);
    return reader.read(kOther, address, target_.data(), count * sizeof(int));
  }

  const Layout layout_{2, std::size_t{1} << 16, std::size_t{1} << 16};
  RegionMemory memory_{std::make_shared<Mapping>(Mapping::create_memory(layout_.total())), layout_,
                       kReader};
  std::optional<CrossMemoryReader> other_{std::in_place, memory_, nullptr, kOther};
  std::vector<int> target_;
};

std::vector<int> numbers() {
  std::vector<int> data(100'000);
  std::iota(data.begin(), data.end(), 0);
  return data;
}

TEST_F(CrossMemory, ReadsWhatARankHas) {
  if (!test::may_read_process(::getpid())) GTEST_SKIP() << "the system forbids it";
  const std::vector<int> data = numbers();
  ASSERT_TRUE(read(::getpid(), data));
  EXPECT_EQ(target_, data);
}

TEST_F(CrossMemory, ReadsAnotherProcess) {
  std::vector<int> data = numbers();
  const Child child;
  if (!test::may_read_process(child.pid())) GTEST_SKIP() << "the system forbids it";
  data.assign(data.size(), 0);
  ASSERT_TRUE(read(child.pid(), data));
  EXPECT_EQ(target_, numbers());
}

TEST_F(CrossMemory, RefusesAProcessWithAnotherMark) {
  const std::vector<int> data = numbers();
  const Child child;  // has all memory of this one, and the mark from before
  other_.emplace(memory_, nullptr, kOther);
  EXPECT_FALSE(read(child.pid(), data));
}

TEST_F(CrossMemory, RefusesWhatIsNotThere) {
  const std::vector<int> data = numbers();
  EXPECT_FALSE(read(0, data)) << "a process that is not visible";
  Child child;
  const pid_t ended = child.pid();
  child.end();
  EXPECT_FALSE(read(ended, data));
  EXPECT_FALSE(read(::getpid(), 64, 1)) << "no such address";
}

TEST_F(CrossMemory, RefusesWhereTheSystemDoes) {
  const std::vector<int> data = numbers();
  bool filtered = false;
  bool done = true;
  std::thread([&] {
    filtered = test::refuse_call(SYS_process_vm_readv);
    done = read(::getpid(), data);
  }).join();
  if (!filtered) GTEST_SKIP() << "no seccomp filters here";
  EXPECT_FALSE(done);
}

}  // namespace
}  // namespace paceline::shm
