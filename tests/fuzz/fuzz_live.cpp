#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/printable.h"
#include "report/analysis/diagnosis.h"
#include "top/live_reader.h"
#include "top/rank_window.h"
#include "top/screen.h"
#include "trace/live_memory.h"

namespace {

using namespace paceline;

// Records with this kind are buckets.
constexpr std::uint64_t kBucketRecord = 200;

struct Memory {
  Memory() : fd(::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    if (::ftruncate(fd, sizeof(trace::LiveMemory)) != 0) std::abort();
    if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0) std::abort();
    content = static_cast<trace::LiveMemory*>(
        ::mmap(nullptr, sizeof(trace::LiveMemory), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    content->header.magic = trace::kLiveMagic;
    content->header.version = trace::kLiveVersion;
  }
  int fd;
  trace::LiveMemory* content;
};

void write_records(const std::vector<std::uint64_t>& words, trace::LiveMemory& memory) {
  trace::RingWriter<trace::SpanRing> spans(memory.spans);
  trace::RingWriter<trace::BucketRing> buckets(memory.buckets);
  trace::SpanRing::Values values;
  for (std::size_t at = 2; at + values.size() <= words.size(); at += values.size()) {
    std::copy_n(words.begin() + static_cast<std::ptrdiff_t>(at), values.size(), values.begin());
    spans.write(values);
    if (values[0] != kBucketRecord) continue;
    trace::BucketRing::Values bucket{};
    std::copy(values.begin() + 1, values.end(), bucket.begin());
    buckets.write(bucket);
  }
}

}  // namespace

// Whatever a process shows: a judgement that fits on the screen.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  static const Memory memory;
  std::vector<std::uint64_t> words(size / sizeof(std::uint64_t));
  if (words.size() < 2) return 0;
  std::memcpy(words.data(), bytes, words.size() * sizeof(std::uint64_t));
  memory.content->spans.count = 0;
  memory.content->buckets.count = 0;
  memory.content->header.place = words[0];
  memory.content->header.node = words[1];
  top::LiveReader reader(memory.fd);
  write_records(words, *memory.content);
  const auto place = reader.place();
  if (!place) return 0;
  top::RankWindow window;
  window.add(reader.read(), std::nullopt);
  window.keep_since(top::Clock::time_point::max(), 20, 1000);
  top::View view{.job = base::printable_line(reader.job()), .recent = {}};
  view.recent.size = place->size;
  view.recent.ranks.push_back(window.trace());
  view.recent.ranks.back().rank = place->rank;
  view.recent.ranks.back().size = place->size;
  report::choose_group(view.recent);
  view.analysis = report::analyse(view.recent);
  view.diagnosis = report::diagnose(view.analysis);
  view.rates = {{place->rank, 0, window.rate(view.recent.model)}};
  if (top::draw(view, 79, 23).size() > 23) std::abort();
  return 0;
}
