# Finds what the build needs besides LibTorch. One error names everything that is missing, since not
# every build has tools/setup: an sdist is built anywhere.

set(wanted fmt libfmt-dev nlohmann_json nlohmann-json3-dev ZLIB zlib1g-dev)
if(PACELINE_COMMAND OR PACELINE_BENCHMARKS)
  list(APPEND wanted CLI11 libcli11-dev)
endif()
if(PACELINE_COMMAND)
  list(APPEND wanted Sodium libsodium-dev)
endif()
set(missing)
set(missing_debian)
while(wanted)
  list(POP_FRONT wanted package debian)
  find_package(${package} QUIET)
  if(NOT ${package}_FOUND)
    list(APPEND missing ${package})
    list(APPEND missing_debian ${debian})
  endif()
endwhile()
if(missing)
  list(JOIN missing ", " missing)
  list(JOIN missing_debian " " missing_debian)
  message(FATAL_ERROR "Paceline's build needs ${missing}. On Debian and Ubuntu: "
                      "apt-get install ${missing_debian}. Elsewhere, install them and name their "
                      "prefix in CMAKE_PREFIX_PATH.")
endif()
find_package(Threads REQUIRED)
foreach(optional yaml-cpp PNG JPEG)  # Debian: libyaml-cpp-dev, libpng-dev, libjpeg-dev
  find_package(${optional} QUIET)
  if(NOT ${optional}_FOUND)
    message(STATUS "${optional}'s library was not found: Paceline will not read such files")
  endif()
endforeach()
if(NOT PACELINE_COMMAND)
  find_package(Sodium QUIET)  # the library can do without it
endif()
