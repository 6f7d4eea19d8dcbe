"use strict";
(() => {
  const body = document.querySelector("tbody"), rows = [...body.rows];
  const headings = [...document.querySelectorAll("thead th")];
  const keys = headings.map((heading) => heading.dataset.key);
  const name = document.getElementById("filter-name"), shown = document.getElementById("shown");
  const selects = [...document.querySelectorAll(".filters select")];
  const unfold = document.getElementById("unfold");

  const filter = () => {
    const wanted = name.value.trim().toLowerCase();
    const asked = selects.some((select) => select.dataset.key === "fate" && select.value);
    let count = 0, away = 0;
    for (const row of rows) {
      const fits = row.cells[0].textContent.toLowerCase().includes(wanted)
        && selects.every((select) => !select.value || row.cells[keys.indexOf(select.dataset.key)].textContent === select.value);
      const folded = fits && row.classList.contains("folded") && !asked && !unfold.checked;
      row.hidden = !fits || folded;
      count += !row.hidden;
      away += folded;
    }
    shown.textContent = `${count} of ${rows.length} ${shown.dataset.row}s` + (away ? `; ${away} more are kept` : "");
  };
  name.addEventListener("input", filter);
  for (const select of selects) select.addEventListener("change", filter);
  if (unfold) unfold.addEventListener("change", filter);
  filter();

  const scroll = document.querySelector(".scroll"), hint = document.getElementById("hint");
  const tellMore = () => {
    const edge = scroll.getBoundingClientRect().right;
    const beyond = headings.filter((heading) => heading.getBoundingClientRect().right > edge + 1).length;
    scroll.parentElement.classList.toggle("more", beyond > 0);
    hint.textContent = beyond ? `${beyond} more ${beyond === 1 ? "column" : "columns"}: scroll sideways \u2192` : "\u2190 scroll back";
  };
  hint.hidden = scroll.scrollWidth <= scroll.clientWidth;
  scroll.addEventListener("scroll", tellMore, { passive: true });
  new ResizeObserver(() => { hint.hidden = scroll.scrollWidth <= scroll.clientWidth; tellMore(); }).observe(scroll);

  const quoted = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const plain = (text) => (/^[=+@\t\r-]/.test(text) ? `'${text}` : text); // a name must not become a spreadsheet's formula
  const csv = () => {
    const cell = (each) => each.dataset.value ?? plain(each.textContent);
    const table = [headings.map((heading) => plain(heading.textContent.trim())), ...rows.map((row) => [...row.cells].map(cell))];
    return table.map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n";
  };
  document.getElementById("csv").addEventListener("click", (event) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    link.download = event.currentTarget.dataset.file;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });

  const copy = async (button) => {
    await navigator.clipboard.writeText(button.dataset.copy);
    const label = button.textContent;
    button.textContent = "copied";
    setTimeout(() => { button.textContent = label; }, 1200);
  };
  for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", () => {
    // Where the browser refuses, the text is there to be seen and copied by hand.
    copy(button).catch(() => prompt("Copy it from here:", button.dataset.copy));
  });

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
