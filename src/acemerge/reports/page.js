"use strict";
(() => {
  const body = document.querySelector("tbody"), rows = [...body.rows];
  const headings = [...document.querySelectorAll("thead th")];
  const keys = headings.map((heading) => heading.dataset.key);
  const name = document.getElementById("filter-name"), shown = document.getElementById("shown");
  const selects = [...document.querySelectorAll(".filters select")];

  const filter = () => {
    const wanted = name.value.trim().toLowerCase();
    let count = 0;
    for (const row of rows) {
      const fits = row.cells[0].textContent.toLowerCase().includes(wanted)
        && selects.every((select) => !select.value || row.cells[keys.indexOf(select.dataset.key)].textContent === select.value);
      row.hidden = !fits;
      count += fits;
    }
    shown.textContent = `${count} of ${rows.length} tensors`;
  };
  name.addEventListener("input", filter);
  for (const select of selects) select.addEventListener("change", filter);

  const sort = (column, heading) => {
    const ascending = heading.getAttribute("aria-sort") === "none" ? !heading.classList.contains("number")
      : heading.getAttribute("aria-sort") === "descending";
    for (const other of headings) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const numeric = heading.classList.contains("number");
    const value = (row) => (numeric ? row.cells[column].dataset.value : row.cells[column].textContent);
    const compare = (a, b) => {
      const x = value(a), y = value(b);
      if (numeric) {
        if (x === "" || y === "") return (x === "") - (y === ""); // what has no number comes last
        return ascending ? x - y : y - x;
      }
      return (ascending ? 1 : -1) * x.localeCompare(y, undefined, { numeric: true });
    };
    body.append(...[...rows].sort(compare));
  };
  headings.forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => sort(column, heading)));
})();
