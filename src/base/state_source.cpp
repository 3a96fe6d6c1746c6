#include "base/state_source.h"

#include <unistd.h>

#include <exception>
#include <list>
#include <mutex>
#include <utility>

#include "base/per_process.h"

namespace paceline::base {
namespace {

struct Sources {
  std::mutex mutex{};
  std::list<const StateSource*> list{};
};

// What a forked child inherits is its parent's: objects may be gone there.
Sources& all_sources() {
  static PerProcess<Sources> instance;
  return instance.get();
}

}  // namespace

StateSource::StateSource(std::string kind, std::function<std::string()> describe)
    : kind_(std::move(kind)), describe_(std::move(describe)), process_(::getpid()) {
  const std::lock_guard lock(all_sources().mutex);
  all_sources().list.push_back(this);
}

StateSource::~StateSource() {
  if (process_ != ::getpid()) return;
  const std::lock_guard lock(all_sources().mutex);
  all_sources().list.remove(this);
}

std::vector<std::string> StateSource::describe_all(const std::string& kind) {
  const std::lock_guard lock(all_sources().mutex);
  std::vector<std::string> texts;
  for (const StateSource* const source : all_sources().list) {
    if (source->kind_ != kind) continue;
    try {
      texts.push_back(source->describe_());
    } catch (const std::exception&) {
      // The other objects may say more.
    }
  }
  return texts;
}

}  // namespace paceline::base
