# Fails where the object of an instruction set offers the linker more than its table. A weak copy of an inline function,
# compiled with wide flags, could be the one that is kept for everybody and stop older processors with SIGILL.
# Arguments: NM, ISA, OBJECT.
execute_process(
  COMMAND "${NM}" --defined-only --extern-only "${OBJECT}"
  OUTPUT_VARIABLE listing OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" symbols "${listing}")
foreach(symbol IN LISTS symbols)
  if(NOT symbol MATCHES " [DR] [^ ]*kernels_${ISA}[^ ]*$")
    message(FATAL_ERROR "isa.cpp for ${ISA} leaves a symbol to the linker: ${symbol}")
  endif()
endforeach()
if(NOT symbols)
  message(FATAL_ERROR "isa.cpp for ${ISA} has no table of kernels")
endif()
