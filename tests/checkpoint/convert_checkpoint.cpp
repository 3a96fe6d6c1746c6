// Reads a file and writes it again, for Python to compare.
//
//   convert_checkpoint value FROM TO     any file of torch.save
//   convert_checkpoint tensors FROM TO   a state dict, in the format that TO's extension says
#include <cstdio>
#include <exception>
#include <string_view>

#include <ATen/core/ivalue.h>
#include <paceline/checkpoint.h>

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  try {
    if (argv[1] == std::string_view("value")) {
      paceline::pickle_save(paceline::pickle_load(argv[2]), argv[3]);
    } else {
      paceline::save(paceline::load(argv[2]), argv[3]);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
