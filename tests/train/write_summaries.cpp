// Writes values for python/tests/test_summaries.py to read.
//
//   write_summaries DIRECTORY FIRST LAST [PURGE_STEP]   i / 8 as loss/train, and -i as b, for steps
//   i
#include <cstdlib>
#include <string>

#include <paceline/summary_writer.h>

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  paceline::SummaryWriterOptions options;
  if (argc > 4) options.purge_step = std::stol(argv[4]);
  paceline::SummaryWriter writer(argv[1], options);
  for (long step = std::stol(argv[2]); step <= std::stol(argv[3]); ++step) {
    writer.add_scalars({{"loss/train", static_cast<double>(step) / 8}, {"b", -step}}, step);
  }
  writer.flush();
  return 0;
}
