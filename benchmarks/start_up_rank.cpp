#include <ATen/Parallel.h>
#include <paceline/collectives.h>
#include <paceline/distributed.h>
#include <paceline/record.h>

#include <cstring>

// What benchmarks/start_up starts: joins, meets the others once and leaves; with --load, does no
// more than load LibTorch.
int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--load") == 0) return at::get_num_threads() > 0 ? 0 : 1;
  return paceline::record([] {
    const auto world = paceline::init_process_group();
    paceline::barrier();
  });
}
