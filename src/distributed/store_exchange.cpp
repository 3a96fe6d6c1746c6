#include "distributed/store_exchange.h"

#include <fmt/format.h>

#include <paceline/error.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "distributed/translate.h"
#include "node/failure.h"

namespace paceline::distributed {

using namespace std::chrono_literals;

namespace {

// How often to ask the store, at first and after a while. Its own wait() would write a warning to
// the log whenever it is cut short to look after the peers.
constexpr std::chrono::milliseconds kFirstPause{1};
constexpr std::chrono::milliseconds kLongestPause{20};

}  // namespace

// False if the deadline passes before all keys are there.
bool StoreExchange::wait_for(const std::vector<std::string>& keys,
                             const base::Deadline& deadline) const {
  for (auto pause = kFirstPause; !request_.store->check(keys);
       pause = std::min(2 * pause, kLongestPause)) {
    request_.check_peers();
    if (deadline.expired()) return request_.store->check(keys);  // after all, perhaps
    std::this_thread::sleep_for(pause);
  }
  return true;
}

std::vector<std::string> StoreExchange::all_gather(const std::string& blob,
                                                   const base::Deadline& deadline) {
  const auto key = [](int rank) { return fmt::format("rank{}", rank); };
  std::vector<std::string> keys;
  for (int rank = 0; rank < size(); ++rank) keys.push_back(key(rank));
  translate("announcing this rank in the store", [&] { request_.store->set(key(rank()), blob); });
  if (!translate("waiting for the other ranks", [&] { return wait_for(keys, deadline); })) {
    const node::RankNumbers numbers(request_.world_ranks);
    std::vector<int> missing;
    translate("asking the store who has come", [&] {
      for (int rank = 0; rank < size(); ++rank) {
        if (!request_.store->check({key(rank)})) missing.push_back(numbers.of(rank));
      }
    });
    throw Timeout(
        fmt::format(
            "{} did not come to the rendezvous within the timeout of {} s; this is rank {} of {}",
            node::describe_ranks(missing), deadline.budget().count() / 1000.0, numbers.of(rank()),
            size()),
        missing, "connect", 0);
  }
  std::vector<std::string> blobs;
  translate("reading the other ranks' addresses from the store", [&] {
    for (const auto& one : keys) blobs.push_back(request_.store->get_to_str(one));
  });
  return blobs;
}

}  // namespace paceline::distributed
