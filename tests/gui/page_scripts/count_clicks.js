// Count what somebody clicks or presses, across pages; the count is in `sessionStorage.clicks`.
document.addEventListener("click", ({ isTrusted }) => {
  if (isTrusted) sessionStorage.clicks = Number(sessionStorage.clicks ?? 0) + 1;
}, { capture: true });
