// Makes the headings of wide tables buttons: numbers sort from the greatest, names from A. A second
// click turns the order around. Cells without a number stay last.
for (const table of document.querySelectorAll(".wide table")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  const valueOf = (row, column) => {
    const { textContent, dataset } = row.cells[column];
    if (column === 0) return textContent.trim();
    return dataset.order === undefined ? null : Number(dataset.order);
  };
  const sort = (column) => {
    const heading = headings[column];
    const descending =
      heading.ariaSort === "ascending" || (column > 0 && heading.ariaSort !== "descending");
    for (const one of headings) one.ariaSort = null;
    heading.ariaSort = descending ? "descending" : "ascending";
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [valueOf(a, column), valueOf(b, column)];
      if (x === null || y === null) return (x === null) - (y === null);
      const ascending = column === 0 ? x.localeCompare(y, "en", { numeric: true }) : x - y;
      return descending ? -ascending : ascending;
    });
    body.append(...rows);
  };
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sort(column));
    heading.append(button);
  });
  table.classList.add("sortable");
}
