#include "distributed/store_calls.h"

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <paceline/error.h>

#include "base/address.h"

namespace paceline::distributed {
namespace {

// How long other groups may take to learn that rank 0 is lost, and the store with it, on a busy
// machine.
constexpr std::chrono::seconds kCause{3};

}  // namespace

std::string describe_store(c10d::Store& store) {
  if (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(&store)) {
    return describe_store(*prefixed->getUnderlyingNonPrefixStore());
  }
  if (const auto* const tcp = dynamic_cast<const c10d::TCPStore*>(&store)) {
    return "the store at tcp://" + base::join_host_port(tcp->getHost(), tcp->getPort());
  }
  if (const auto* const file = dynamic_cast<const c10d::FileStore*>(&store)) {
    return "the store at file://" + file->getPath();
  }
  return "the store";
}

void explain_lost_store(const std::string& text, c10d::Store& store, std::optional<int> server,
                        const std::function<void()>& check_peers, const shm::OpContext& op) {
  const auto soon = base::Deadline::after(kCause);
  while (!soon.expired()) {
    check_peers();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  constexpr const char* kLost = "has ended, or cannot be reached any more";
  if (!server) {
    throw Error(fmt::format("{}. {} {}; if rank 0 served it, see why rank 0 ended", text,
                            describe_store(store), kLost));
  }
  throw PeerLost(fmt::format("rank {} was lost: {}, which it served, {} ({})", *server,
                             describe_store(store), kLost, text),
                 {*server}, op.operation, op.sequence);
}

}  // namespace paceline::distributed
