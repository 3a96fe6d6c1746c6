#pragma once

#include <bit>

namespace paceline::checkpoint {

static_assert(std::endian::native == std::endian::little, "as in pickles");

// Of the protocols 2 to 5, as CPython's pickletools.py names them.
enum class Opcode : unsigned char {
  proto = 0x80,
  frame = 0x95,
  stop = '.',
  mark = '(',
  pop = '0',
  pop_mark = '1',
  none = 'N',
  newtrue = 0x88,
  newfalse = 0x89,
  binint = 'J',
  binint1 = 'K',
  binint2 = 'M',
  long1 = 0x8a,
  long4 = 0x8b,
  binfloat = 'G',
  short_binstring = 'U',
  binstring = 'T',
  short_binbytes = 'C',
  binbytes = 'B',
  binbytes8 = 0x8e,
  bytearray8 = 0x96,
  short_binunicode = 0x8c,
  binunicode = 'X',
  binunicode8 = 0x8d,
  empty_list = ']',
  append = 'a',
  appends = 'e',
  empty_tuple = ')',
  tuple1 = 0x85,
  tuple2 = 0x86,
  tuple3 = 0x87,
  tuple = 't',
  empty_dict = '}',
  setitem = 's',
  setitems = 'u',
  empty_set = 0x8f,
  additems = 0x90,
  frozenset = 0x91,
  binput = 'q',
  long_binput = 'r',
  memoize = 0x94,
  binget = 'h',
  long_binget = 'j',
  global = 'c',
  stack_global = 0x93,
  reduce = 'R',
  newobj = 0x81,
  newobj_ex = 0x92,
  build = 'b',
  binpersid = 'Q',
};

}  // namespace paceline::checkpoint
