# Finds MPI libraries, one for each ABI: Debian's, and the one in MPI_HOME. Makes a target Mpi::NAME of each, and lists
# the names in PACELINE_MPIS. "mpich" is also the ABI of Intel MPI, MVAPICH and others.

set(multiarch /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE})
set(mpich_includes /usr/include/${CMAKE_LIBRARY_ARCHITECTURE}/mpich)
set(mpich_libraries ${multiarch})
set(openmpi_includes ${multiarch}/openmpi/include)
set(openmpi_libraries ${multiarch}/openmpi/lib)
if(EXISTS $ENV{MPI_HOME}/include/mpi.h)
  file(STRINGS $ENV{MPI_HOME}/include/mpi.h is_openmpi REGEX "define OPEN_MPI " LIMIT_COUNT 1)
  set(name mpich)
  if(is_openmpi)
    set(name openmpi)
  endif()
  list(PREPEND ${name}_includes $ENV{MPI_HOME}/include)
  set(${name}_programs $ENV{MPI_HOME}/bin)
  list(PREPEND ${name}_libraries $ENV{MPI_HOME}/lib $ENV{MPI_HOME}/lib64 $ENV{MPI_HOME}/lib/release)
endif()

set(PACELINE_MPIS)
foreach(name mpich openmpi)
  find_path(Mpi_${name}_INCLUDE_DIR mpi.h PATHS ${${name}_includes} NO_DEFAULT_PATH)
  find_library(Mpi_${name}_LIBRARY NAMES mpich mpi NAMES_PER_DIR PATHS ${${name}_libraries} NO_DEFAULT_PATH)
  find_program(Mpi_${name}_MPIRUN NAMES mpirun.${name} mpirun HINTS ${${name}_programs} /usr/bin)
  mark_as_advanced(Mpi_${name}_INCLUDE_DIR Mpi_${name}_LIBRARY Mpi_${name}_MPIRUN)
  if(Mpi_${name}_INCLUDE_DIR AND Mpi_${name}_LIBRARY)
    list(APPEND PACELINE_MPIS ${name})
    add_library(Mpi::${name} UNKNOWN IMPORTED)
    set_target_properties(Mpi::${name} PROPERTIES
      IMPORTED_LOCATION ${Mpi_${name}_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${Mpi_${name}_INCLUDE_DIR}
      # Without the bindings for C++, which MPI no longer has.
      INTERFACE_COMPILE_DEFINITIONS "OMPI_SKIP_MPICXX;MPICH_SKIP_MPICXX")
  endif()
endforeach()
